"""Configs of mixers: the part of a layer that combines information across tokens."""

import dataclasses
from typing import Literal

from jaxspec.config.blocks import BlockIndexConfig
from jaxspec.config.checks import check_positive
from jaxspec.config.entries import EntryAttentionConfig
from jaxspec.config.indexer import IndexerConfig, MeanIndexerConfig
from jaxspec.config.recurrent import RecurrentConfig
from jaxspec.config.rope import LongRopeScaling, RopeConfig, YarnRopeScaling


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped KV heads.

    Attributes:
      window: a token attends to this many latest positions, its own included; None: to all.
      qk_norm: queries and keys are normed before they are rotated: each head by itself, or with
        ``whole_qk_norm`` all query heads as one vector, and all key heads.
      norm_after_rope: they are rotated before they are normed.
      unit_qk_norm: queries and keys of each head are normed, and the norms have no weights.
      chunk: a token attends to positions of its own span of so many only; None: there are none.
      scale: of the scores; None: 1 / sqrt(head_dim).
      softcap: scores x become softcap * tanh(x / softcap).
      sinks: each query head has a score for attending to nothing (see paged_attention).
      fused: checkpoints have the three projections in one tensor, ``qkv_proj``.
      gate: what a head attends to is multiplied by a sigmoid of the token. ``entries``: entry by
        entry; in checkpoints ``q_proj`` has each head's query, then its gate. ``heads``: by a
        number for each head, of a projection ``g_proj``.
      interleaved: in checkpoints entries 2 i and 2 i + 1 of a head are rotated as a pair. When they
        are read, they become i and i + D / 2.
      out_multiplier: of the output projection, which is multiplied when it is read.
      value_norm: values are normed, each head by itself, by a norm without a weight.
      values_are_keys: values are the keys as they are before their norm and rotation; checkpoints
        have no ``v_proj``.
    """

    num_heads: int
    num_kv_heads: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    fused: bool = False
    gate: Literal["entries", "heads"] | None = None
    interleaved: bool = False
    norm_after_rope: bool = False
    out_multiplier: float = 1.0
    value_norm: bool = False
    values_are_keys: bool = False
    unit_qk_norm: bool = False
    chunk: int | None = None

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        check_positive(out_multiplier=self.out_multiplier)
        for name in ("window", "scale", "softcap", "chunk"):
            value = getattr(self, name)
            if value is not None:
                check_positive(**{name: value})
        if self.whole_qk_norm and not self.qk_norm:
            raise ValueError("whole_qk_norm says how queries and keys are normed: set qk_norm, too")
        if self.unit_qk_norm and self.qk_norm:
            raise ValueError("unit_qk_norm says that norms have no weights: leave out qk_norm")
        if self.norm_after_rope and (not self.qk_norm or self.whole_qk_norm):
            raise ValueError("norm_after_rope is for qk_norm of each head by itself")
        if self.norm_after_rope and isinstance(
            self.rope.scaling, YarnRopeScaling | LongRopeScaling
        ):
            raise ValueError("norm_after_rope: yarn and longrope multiply heads, which is not read")
        if self.gate == "entries" and (self.fused or self.whole_qk_norm):
            raise ValueError("gated attention has projections and norms of each head by itself")
        if (self.value_norm or self.values_are_keys) and (self.fused or self.gate):
            raise ValueError("value_norm and values_are_keys go with neither fused nor gate")
        partly = self.rope.rotary_dim not in (None, 0)
        if self.interleaved and (self.qk_norm or self.gate or partly):
            raise ValueError(
                "interleaved attention has whole heads rotated, and no weights of norms or gates"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.rope.head_dim

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.num_heads} query and {self.num_kv_heads} KV heads of {self.head_dim}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Raise ValueError unless the window shows every node of a tree all its ancestors."""
        if self.window is not None and self.window <= max_depth:
            raise ValueError(
                f"a tree of depth {max_depth} does not fit the model's sliding window of "
                f"{self.window} positions: choose a smaller depth"
            )


@dataclasses.dataclass(frozen=True)
class IndexedAttentionConfig:
    """Attention with grouped KV heads to the positions that an indexer chooses.

    Attributes:
      attention: of all that it says positions are chosen.
    """

    attention: AttentionConfig
    indexer: MeanIndexerConfig

    def __post_init__(self):
        others = ["window", "chunk", "softcap", "sinks"]
        if wrong := [name for name in others if getattr(self.attention, name)]:
            raise ValueError(f"attention with an indexer goes without {', '.join(wrong)}")
        rope = self.attention.rope
        rotated = rope.head_dim if rope.rotary_dim is None else rope.rotary_dim
        if rotated > self.indexer.head_dim:
            raise ValueError(
                f"indexer_head_dim ({self.indexer.head_dim}) must be at least {rotated}, the "
                "entries of a head that are rotated"
            )

    @property
    def index_rope(self) -> RopeConfig:
        """The rope of the indexer's queries and keys: as many entries are rotated as of a head."""
        rope, width = self.attention.rope, self.indexer.head_dim
        rotated = rope.head_dim if rope.rotary_dim is None else rope.rotary_dim
        return dataclasses.replace(
            rope, head_dim=width, rotary_dim=None if rotated == width else rotated
        )

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.attention.num_heads

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.attention.heads}, whose positions an indexer chooses"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return self.attention.rope, self.index_rope

    def check_tree_depth(self, max_depth: int) -> None:
        """Any tree fits: every node sees all its ancestors."""


@dataclasses.dataclass(frozen=True)
class SharedAttentionConfig:
    """Attention whose queries read the keys and values of another layer, and that has none.

    Attributes:
      attention: as that layer's, whose KV heads these are.
      source: index of that layer in the model; None: it is one of another model.
    """

    attention: AttentionConfig
    source: int | None

    def __post_init__(self):
        others = ["gate", "fused", "whole_qk_norm", "interleaved", "norm_after_rope", "sinks"]
        if wrong := [name for name in others if getattr(self.attention, name)]:
            raise ValueError(f"attention without keys of its own goes without {', '.join(wrong)}")

    @property
    def heads(self) -> str:
        """In words."""
        where = "another model" if self.source is None else f"layer {self.source}"
        return f"{self.attention.heads} of {where}"

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.attention.num_heads

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return self.attention.ropes

    def check_tree_depth(self, max_depth: int) -> None:
        """Raise ValueError unless the window shows every node of a tree all its ancestors."""
        self.attention.check_tree_depth(max_depth)


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are
    projections of one vector of a token, which is all that is kept of it.

    Attributes:
      rope: of the part of queries and keys that is rotated. That of keys is shared by all heads.
        None: there is no such part.
      latent: entries of the vector, besides the rotated ones.
      key_dim, value_dim: of a head's keys that are not rotated, and of its values.
      query_latent: entries of a vector that queries are projections of; None: of the input itself.
      scale: of the scores.
      interleaved: rotated entries 2 i and 2 i + 1 are a pair; else i and i + D / 2.
      bias: of the projections of the input, and of the output's.
      indexer: tokens attend to the positions that it chooses; None: to all that they see.
      norm_eps: of the norms of latents.
      gate: what a head attends to is multiplied by a sigmoid of the token, of a projection
        ``g_proj``. ``heads``: by a number for each head; ``entries``: entry by entry.
      sinks: each head has a score for attending to nothing (see paged_attention).
    """

    num_heads: int
    rope: RopeConfig | None
    latent: int
    key_dim: int
    value_dim: int
    query_latent: int | None
    scale: float
    interleaved: bool
    bias: bool = False
    indexer: IndexerConfig | None = None
    norm_eps: float = 1e-6
    gate: Literal["heads", "entries"] | None = None
    sinks: bool = False

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, kv_lora_rank=self.latent, scale=self.scale)
        check_positive(qk_nope_head_dim=self.key_dim, v_head_dim=self.value_dim)
        check_positive(norm_eps=self.norm_eps)
        if self.query_latent is not None:
            check_positive(q_lora_rank=self.query_latent)
        if self.indexer is None:
            return
        if self.query_latent is None:
            raise ValueError("an indexer reads the queries' latent: q_lora_rank must not be null")
        if self.indexer.head_dim < self.rotated_dim:
            raise ValueError(
                f"index_head_dim ({self.indexer.head_dim}) must be at least qk_rope_head_dim "
                f"({self.rotated_dim})"
            )

    @property
    def rotated_dim(self) -> int:
        """Entries of queries and keys that are rotated."""
        return 0 if self.rope is None else self.rope.head_dim

    @property
    def index_dim(self) -> int:
        """Entries that are kept of a token for an indexer; 0: the layer has no indexer."""
        return 0 if self.indexer is None or self.indexer.shared else self.indexer.stored_dim

    @property
    def stored_dim(self) -> int:
        """Entries that are kept of a token, besides an indexer's."""
        return self.latent + self.rotated_dim

    def entries_read(self, context: float) -> float:
        """Entries that are read of so many tokens: a vector of each that is attended to, and a key
        of each, or of each pool, that the layer's indexer scores."""
        if self.indexer is None:
            return context * self.stored_dim
        keys = context / self.indexer.pool * self.indexer.head_dim if self.index_dim else 0
        return keys + min(context, self.indexer.most) * self.stored_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rotated_dim

    def expands(self, num_tokens: int, num_slots: int) -> bool:
        """Whether so many tokens of a sequence attend to so many slots with fewer multiplications
        if keys and values of the heads are computed: of each slot, instead of queries projected to
        the latent's space and sums of latents projected to values, of each token. Not with sinks.
        """
        if self.sinks:
            return False
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
        return () if self.rope is None else (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Any tree fits: every node sees all its ancestors."""


@dataclasses.dataclass(frozen=True)
class BlockSparseConfig:
    """Attention with grouped KV heads to blocks of positions, which an index head chooses for each
    KV head (MiniMax M3).

    Attributes:
      attention: its heads, to all that a token sees in the blocks.
    """

    attention: AttentionConfig
    index: BlockIndexConfig

    def __post_init__(self):
        others = ("window", "chunk", "sinks", "softcap", "gate", "values_are_keys", "value_norm")
        others += ("whole_qk_norm", "unit_qk_norm", "norm_after_rope", "interleaved")
        if wrong := [name for name in others if getattr(self.attention, name)]:
            raise ValueError(f"attention to chosen blocks goes without {', '.join(wrong)}")
        if self.index.head_dim < self.rotated_dim:
            raise ValueError(
                f"index_head_dim ({self.index.head_dim}) must be at least rotary_dim "
                f"({self.rotated_dim})"
            )

    @property
    def rotated_dim(self) -> int:
        """Entries of a head, and of an index head, that are rotated."""
        rope = self.attention.rope
        return rope.head_dim if rope.rotary_dim is None else rope.rotary_dim

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.attention.num_heads

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.attention.heads}, to blocks of {self.index.size} positions"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return self.attention.ropes

    def check_tree_depth(self, max_depth: int) -> None:
        """Any tree fits: every node chooses among the blocks of its own path."""


SingleMixerConfig = (
    AttentionConfig
    | IndexedAttentionConfig
    | SharedAttentionConfig
    | BlockSparseConfig
    | LatentConfig
    | EntryAttentionConfig
    | RecurrentConfig
)


@dataclasses.dataclass(frozen=True)
class SideBySideConfig:
    """Two mixers that read the same input, and whose outputs are added, as in Falcon-H1."""

    first: SingleMixerConfig
    second: SingleMixerConfig

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.first.heads} beside {self.second.heads}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that both use."""
        return *self.first.ropes, *self.second.ropes

    def check_tree_depth(self, max_depth: int) -> None:
        """Raise ValueError unless both take such trees."""
        self.first.check_tree_depth(max_depth)
        self.second.check_tree_depth(max_depth)


MixerConfig = SingleMixerConfig | SideBySideConfig
