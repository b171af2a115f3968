"""Config of attention to a window of tokens, and to entries that stand for spans of tokens."""

import dataclasses

from jaxspec.config.checks import check_positive
from jaxspec.config.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class EntryIndexerConfig:
    """An indexer: it scores the entries that a token sees, and the token attends to the best
    ``top_k``. It has keys of its own, which are made of tokens as entries are."""

    top_k: int
    num_heads: int
    head_dim: int

    def __post_init__(self):
        check_positive(index_topk=self.top_k, index_n_heads=self.num_heads)
        check_positive(index_head_dim=self.head_dim)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return (self.num_heads * self.head_dim) ** -0.5


@dataclasses.dataclass(frozen=True)
class SpansConfig:
    """Which tokens an entry stands for: those of a span of ``size``, counted from the first one.

    Attributes:
      overlapping: it is made of the span before, too, of other channels of these tokens.
      indexer: None: a token attends to the entries of all spans that it sees whole.
    """

    size: int
    overlapping: bool = False
    indexer: EntryIndexerConfig | None = None

    def __post_init__(self):
        check_positive(span=self.size)

    @property
    def members(self) -> int:
        """The tokens that an entry is made of."""
        return self.size * (2 if self.overlapping else 1)

    def kept_of(self, width: int) -> int:
        """Numbers that are kept of a token, for entries of ``width``: values and gates."""
        return width * (4 if self.overlapping else 2)


@dataclasses.dataclass(frozen=True)
class EntryAttentionConfig:
    """Attention of many heads to one vector of each position, which is key and value at once: of
    the latest tokens, and of spans further back and near (DeepSeek-V4).

    Attributes:
      head_dim: of queries and vectors.
      rope: of their last entries, of which 2 i and 2 i + 1 are a pair. What a head attends to is
        rotated back by the query's position.
      query_latent: entries of a vector that queries are projections of.
      window: a token attends to this many latest positions, its own included.
      groups, group_rank: heads of a group are projected to so many numbers together, and those of
        all groups to hidden states.
      spans: None: there are no entries.
    """

    num_heads: int
    head_dim: int
    rope: RopeConfig
    query_latent: int
    window: int
    groups: int
    group_rank: int
    spans: SpansConfig | None = None

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, head_dim=self.head_dim, window=self.window)
        check_positive(q_lora_rank=self.query_latent)
        check_positive(o_groups=self.groups, o_lora_rank=self.group_rank)
        if self.num_heads % self.groups:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of o_groups "
                f"({self.groups})"
            )
        widths = [self.head_dim] + [self.index_dim] * (self.index_dim > 0)
        if min(widths) < self.rope.head_dim:
            raise ValueError(
                f"qk_rope_head_dim ({self.rope.head_dim}) must be at most head_dim "
                f"({self.head_dim}), and index_head_dim ({self.index_dim})"
            )

    @property
    def index_dim(self) -> int:
        """Entries of a key of the indexer; 0: there is none."""
        return self.spans.indexer.head_dim if self.spans and self.spans.indexer else 0

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5

    def entries_read(self, context: float) -> float:
        """Numbers that are read of so many tokens."""
        near = min(context, self.window) * self.head_dim
        if self.spans is None:
            return near
        entries = context // self.spans.size
        if self.spans.indexer is None:
            return near + entries * self.head_dim
        chosen = min(entries, self.spans.indexer.top_k)
        return near + chosen * self.head_dim + entries * self.index_dim

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.num_heads} heads over one vector of {self.head_dim}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Any tree fits: windows are those of a node's own path."""
