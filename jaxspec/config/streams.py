"""Configs of several residual streams."""

import dataclasses
from typing import ClassVar

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class StreamsConfig:
    """Several residual streams that each block reads as one and writes as one, and that are mixed
    between (manifold-constrained hyper-connections, arXiv 2512.24880).

    Attributes:
      count: of the streams.
      iterations: of Sinkhorn and Knopp, which bring sums of rows and columns of a mixing matrix to
        1.
      eps: what keeps its divisors, and the weights of reading, above 0.
      folded: what follows the layers reads a sum of the streams with weights that depend on the
        token; else their mean.
      magnitude: None: streams are mixed, and what a block gives is multiplied by up to 2. A number:
        they are not mixed, and it is multiplied by up to that, plus ``eps`` (Hy4).
    """

    count: int
    iterations: int
    eps: float
    folded: bool = False
    magnitude: float | None = None

    def __post_init__(self):
        check_positive(hc_mult=self.count, hc_sinkhorn_iters=self.iterations, hc_eps=self.eps)
        if self.magnitude is not None:
            check_positive(hc_magnitude=self.magnitude)

    @property
    def kinds(self) -> tuple[int, ...]:
        """How many numbers of a token a block's connection has of each kind: see
        HyperConnection."""
        mixing = () if self.magnitude is not None else (self.count * self.count,)
        return self.count, self.count, *mixing


@dataclasses.dataclass(frozen=True)
class GatedStreamsConfig:
    """Several residual streams that blocks read through gates of each entry, and add to
    (Qwen3.8-Flash-Next). A stream is normed before it is read.

    Attributes:
      count: of the streams.
      rank: entries of the vector that gates are projections of.
    """

    count: int
    rank: int
    folded: ClassVar[bool] = True  # what follows the layers reads through gates, too

    def __post_init__(self):
        check_positive(hc_lowrank=self.rank)
        if self.count < 2:
            raise ValueError(f"hc_count must be 2 or more, got {self.count}")


AnyStreamsConfig = StreamsConfig | GatedStreamsConfig
