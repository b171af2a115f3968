"""Config of YaRN, a rope scaling for contexts longer than those of training."""

import dataclasses

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling:
    """Frequencies are divided by ``factor`` where they turn less than ``beta_slow`` times over the
    original positions, kept where they turn more than ``beta_fast`` times, and interpolated between
    (``rope_type: yarn``; Peng et al., arXiv 2309.00071).

    Attributes:
      attention_factor: cosines and sines are multiplied by it, so scores by its square.
      truncate: the borders between frequencies are rounded outwards to whole ones.
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
            beta_slow=self.beta_slow,
        )
        if not self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow ({self.beta_slow}) must be below beta_fast ({self.beta_fast})"
            )
