"""Configs of MLPs: the part of a layer that works on each token separately."""

import dataclasses

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A SwiGLU MLP."""

    intermediate_size: int
    bias: bool = False

    def __post_init__(self):
        check_positive(intermediate_size=self.intermediate_size)
