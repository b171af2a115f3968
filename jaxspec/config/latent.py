"""Config of latent attention."""

import dataclasses

from jaxspec.config.checks import check_positive
from jaxspec.config.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are
    projections of one vector of a token, which is all that is kept of it.

    Attributes:
      rope: of the part of queries and keys that is rotated. That of keys is shared by all heads.
      latent: entries of the vector, besides the rotated ones.
      key_dim, value_dim: of a head's keys that are not rotated, and of its values.
      query_latent: entries of a vector that queries are projections of; None: of the input itself.
      scale: of the scores.
      interleaved: rotated entries 2 i and 2 i + 1 are a pair; else i and i + D / 2.
      bias: of the projections of the input, and of the output's.
    """

    num_heads: int
    rope: RopeConfig
    latent: int
    key_dim: int
    value_dim: int
    query_latent: int | None
    scale: float
    interleaved: bool
    bias: bool = False

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, kv_lora_rank=self.latent, scale=self.scale)
        check_positive(qk_nope_head_dim=self.key_dim, v_head_dim=self.value_dim)
        if self.query_latent is not None:
            check_positive(q_lora_rank=self.query_latent)

    @property
    def stored_dim(self) -> int:
        """Entries that are kept of a token."""
        return self.latent + self.rope.head_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rope.head_dim

    def expands(self, num_tokens: int, num_slots: int) -> bool:
        """Whether so many tokens of a sequence attend to so many slots with fewer multiplications
        if keys and values of the heads are computed: of each slot, instead of queries projected to
        the latent's space and sums of latents projected to values, of each token.
        """
        up = self.latent * (self.key_dim + self.value_dim)
        absorbed = num_tokens * (up + num_slots * 2 * self.stored_dim)
        expanded = num_slots * (up + num_tokens * (self.query_dim + self.value_dim))
        return expanded < absorbed

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.num_heads} heads over a latent of {self.latent}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Any tree fits: every node sees all its ancestors."""
