"""Configs of rotary position embeddings."""

import dataclasses

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent rope scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        check_positive(**dataclasses.asdict(self))
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must not be above high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Positions are divided by ``factor`` (``rope_type: linear``)."""

    factor: float

    def __post_init__(self):
        check_positive(factor=self.factor)


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv 2309.00071, ``rope_type: yarn``): frequencies of few rotations within the
    original positions are divided by ``factor``, those of many are kept.

    Attributes:
      attention_factor: rotated queries and keys are multiplied by it.
      beta_fast, beta_slow: rotations from which on a frequency is kept, and up to which it is
        divided; those between are interpolated.
      truncate: the interpolation begins and ends at whole entries of a head.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        check_positive(
            factor=self.factor,
            original_max_position=self.original_max_position,
            attention_factor=self.attention_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Frequencies that are divided by a factor each (LongRoPE, arXiv 2402.13753).

    Attributes:
      attention_factor: rotated queries and keys are multiplied by it.
      max_position: longer sequences need other factors, for all their positions; None: the factors
        are for any length.
    """

    factors: tuple[float, ...]
    attention_factor: float
    max_position: int | None = None

    def __post_init__(self):
        check_positive(attention_factor=self.attention_factor)
        check_positive(factor=min(self.factors, default=0))
        if self.max_position is not None:
            check_positive(max_position=self.max_position)


@dataclasses.dataclass(frozen=True)
class ProportionalRopeScaling:
    """The first ``pairs`` frequencies of a whole head, with the others 0 (``rope_type:
    proportional``)."""

    pairs: int

    def __post_init__(self):
        check_positive(pairs=self.pairs)


RopeScaling = (
    Llama3RopeScaling
    | LinearRopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling
)


@dataclasses.dataclass(frozen=True)
class QueryScaling:
    """Queries are multiplied by 1 + beta ln(1 + floor(position / original_max_position)), where the
    first position is ``first``."""

    beta: float
    original_max_position: int
    first: int = 0

    def __post_init__(self):
        check_positive(beta=self.beta, original_max_position=self.original_max_position)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of heads of width ``head_dim``.

    Attributes:
      rotary_dim: only so many leading entries of a head are rotated; 0: none, as in layers without
        positions. None: all.
      query_scaling: what positions do to queries besides; None: nothing.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    query_scaling: QueryScaling | None = None

    def __post_init__(self):
        check_positive(head_dim=self.head_dim, rope_theta=self.theta)
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")
        rotary = self.rotary_dim
        if rotary is not None and (rotary % 2 or not 0 <= rotary < self.head_dim):
            raise ValueError(
                f"rotary_dim must be even and below head_dim {self.head_dim}, or None, got {rotary}"
            )
        if isinstance(self.scaling, ProportionalRopeScaling):
            self._check_proportional(self.scaling.pairs)
        if isinstance(self.scaling, LongRopeScaling):
            pairs, given = (
                (self.head_dim if rotary is None else rotary) // 2,
                len(self.scaling.factors),
            )
            if given != pairs:
                raise ValueError(f"longrope has {given} factors for {pairs} frequencies")

    def _check_proportional(self, pairs: int) -> None:
        if self.rotary_dim is not None or pairs > self.head_dim // 2:
            raise ValueError(
                f"{pairs} proportional frequencies need a head_dim of twice as many at least, and "
                f"no rotary_dim; got {self.head_dim} and {self.rotary_dim}"
            )
