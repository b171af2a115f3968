"""Configuration of models, cache and speculation: frozen, hashable dataclasses."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Acceptance = Literal["match", "rejection"]
Proposal = Literal["top_k", "coupled", "sampled"]


def _check_positive(**values: float) -> None:
    """Raise ValueError unless each value is above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent rope scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        _check_positive(**dataclasses.asdict(self))
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of heads of width ``head_dim``."""

    head_dim: int
    theta: float
    scaling: Llama3RopeScaling | None = None

    def __post_init__(self):
        _check_positive(head_dim=self.head_dim, rope_theta=self.theta)
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped KV heads.

    ``window``: number of latest positions that a token attends to, its own included; None: all.
    """

    num_heads: int
    num_kv_heads: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        _check_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        if self.window is not None:
            _check_positive(window=self.window)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.rope.head_dim

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Raises ValueError unless a tree of ``max_depth`` fits in the window, which must not hide
        any ancestor of a node."""
        if self.window is not None and self.window <= max_depth:
            raise ValueError(
                f"a tree of depth {max_depth} does not fit the model's sliding window of "
                f"{self.window} positions: choose a smaller depth"
            )


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A SwiGLU MLP."""

    intermediate_size: int
    bias: bool = False

    def __post_init__(self):
        _check_positive(intermediate_size=self.intermediate_size)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One transformer layer: a mixer (attention) and an MLP."""

    mixer: AttentionConfig
    mlp: DenseConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: the configs of its layers, and the sizes around them."""

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position: int
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _check_positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        _check_positive(rms_norm_eps=self.rms_norm_eps, max_position=self.max_position)
        _check_positive(num_layers=self.num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def check_tree_depth(self, max_depth: int) -> None:
        """Raises ValueError unless every layer can verify a tree of ``max_depth``."""
        for layer in self.layers:
            layer.mixer.check_tree_depth(max_depth)

    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> "ModelConfig":
        """The same model with every layer's config changed."""
        return dataclasses.replace(self, layers=tuple(map(change, self.layers)))


def dense_model(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rms_norm_eps: float,
    rope_theta: float,
    max_position: int,
    sliding_windows: tuple[int | None, ...] | None = None,
    rope_scaling: Llama3RopeScaling | None = None,
    tie_word_embeddings: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> ModelConfig:
    """A model of attention and SwiGLU layers that differ only in their windows.

    ``sliding_windows`` has one entry per layer (see AttentionConfig.window); None: no windows.

    Raises ValueError if the number of windows is not the number of layers.
    """
    windows = (None,) * num_layers if sliding_windows is None else sliding_windows
    if len(windows) != num_layers:
        raise ValueError(f"sliding_windows has {len(windows)} entries for {num_layers} layers")
    rope = RopeConfig(head_dim, rope_theta, rope_scaling)
    layers = tuple(
        LayerConfig(
            AttentionConfig(num_heads, num_kv_heads, rope, window, qkv_bias, o_bias, qk_norm),
            DenseConfig(intermediate_size, mlp_bias),
        )
        for window in windows
    )
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_norm_eps=rms_norm_eps,
        max_position=max_position,
        layers=layers,
        tie_word_embeddings=tie_word_embeddings,
        stop_token_ids=stop_token_ids,
    )


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Geometry of the paged KV cache.

    ``max_length`` counts a sequence's prompt and generated tokens; ``num_pages`` bounds the pages
    of all sequences together, those past it wait for the next batch; None: as many as the engine's
    rows can need.
    """

    page_size: int = 16
    max_length: int = 1024
    num_pages: int | None = None

    def __post_init__(self):
        if self.page_size < 1 or self.max_length < 2:
            raise ValueError(
                f"page_size must be >= 1 and max_length >= 2, got {self.page_size} and "
                f"{self.max_length}"
            )
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {self.num_pages}")


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Shape of the draft trees of one call.

    Attributes:
      num_nodes: nodes of the tree, the root (the last committed token) included.
      max_depth: depth of the deepest node; a chain of ``k`` drafted tokens has ``max_depth = k``.
      top_k: children proposed for each expanded node; with 1 the tree is a chain.
    """

    num_nodes: int = 6
    max_depth: int = 5
    top_k: int = 1

    def __post_init__(self):
        if self.is_plain:
            if self.max_depth != 0 or self.top_k != 1:
                raise ValueError("a tree with only the root must have max_depth 0 and top_k 1")
            return
        if self.max_depth < 1 or self.top_k < 1 or self.num_nodes < 2:
            raise ValueError(
                "a draft tree needs max_depth >= 1, top_k >= 1 and num_nodes >= 2, got "
                f"{self.max_depth}, {self.top_k} and {self.num_nodes}"
            )
        if self.num_nodes <= self.max_depth:
            raise ValueError(
                f"num_nodes ({self.num_nodes}) must exceed max_depth ({self.max_depth}): "
                "the root counts as a node"
            )
        if self.top_k == 1 and self.num_nodes != self.max_depth + 1:
            raise ValueError(
                f"a chain (top_k 1) of depth {self.max_depth} has {self.max_depth + 1} nodes, "
                f"not {self.num_nodes}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether this is plain decoding: nothing is drafted."""
        return self.num_nodes == 1

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def scratch_slots(self) -> int:
        """Slots past the context that a round may write, for the tree or the drafter's levels."""
        return max(self.num_nodes, 1 + self.top_k * self.max_depth)

    @property
    def shape(self) -> "TreeShape":
        """The shape without the fields of a subclass."""
        return TreeShape(self.num_nodes, self.max_depth, self.top_k)

    @classmethod
    def parse(cls, text: str):
        """``plain``, ``chain:K`` or ``NODES:DEPTH:TOPK``, as the command lines write trees.

        The last may begin with ``tree:``. Raises ValueError for anything else.
        """
        kind, *sizes = text.split(":") if text[:1].isalpha() else ["tree", *text.split(":")]
        numbers = [int(size) for size in sizes] if all(map(str.isdecimal, sizes)) else None
        try:
            match kind, numbers:
                case "plain", []:
                    return cls(1, 0, 1)
                case "chain", [tokens]:
                    return cls(tokens + 1, tokens, 1)
                case "tree", [nodes, depth, top_k]:
                    return cls(nodes, depth, top_k)
        except ValueError as error:
            raise ValueError(f"tree {text!r}: {error}") from None
        raise ValueError(f"{text!r} is not plain, chain:K or NODES:DEPTH:TOPK")


PLAIN = TreeShape(1, 0, 1)


def sound_proposals(acceptance: str, is_chain: bool) -> tuple[Proposal, ...]:
    """Proposals for which a named acceptance rule samples exactly from the target, the best first.

    Raises ValueError for another name.
    """
    match acceptance:
        case "match":
            return ("coupled", "top_k")
        case "rejection":
            return ("sampled", "top_k") if is_chain else ("top_k",)
    raise ValueError(
        f"acceptance must be match, rejection or a rule of your own, got {acceptance!r}"
    )


@dataclasses.dataclass(frozen=True)
class SpeculationConfig(TreeShape):
    """The largest draft tree of an engine, and the rule that accepts its nodes.

    The shape is a capacity: the engine's state has room for it. A call drafts trees of this shape,
    unless it asks for a smaller one.

    Attributes:
      acceptance: ``match`` commits the tokens that the target samples, so the text does not depend
        on the drafter. ``rejection`` is classical speculative sampling. Or pass your own rule
        (see speculation.acceptance.AcceptanceRule).
      proposal: how drafters with probabilities choose tokens. ``top_k`` takes the likeliest tokens.
        ``coupled`` ranks tokens with the target's sampling noise added (not under ``rejection``;
        equal to ``top_k`` at temperature 0). ``sampled`` draws from the drafter's distribution
        (only for chains under ``rejection``). None: the first proposal that the rule allows.
      verify_width: pad every verification (also in plain decoding) to this many nodes, and make
        attention sums independent of slot order. In bf16 the text then does not depend on the tree,
        in the same batch bucket and page-table width.
    """

    acceptance: Acceptance | Any = "match"
    proposal: Proposal | None = None
    verify_width: int | None = None

    def __post_init__(self):
        super().__post_init__()
        allowed = self._proposals()
        if self.proposal not in (None, "top_k", "coupled", "sampled"):
            raise ValueError(f"proposal must be top_k, coupled or sampled, got {self.proposal!r}")
        if self.proposal is not None and self.proposal not in allowed:
            kind = "chain" if self.is_chain else "tree"
            raise ValueError(
                f"proposal {self.proposal!r} does not go with acceptance {self.acceptance!r} and a "
                f"{kind}: choose {' or '.join(allowed)}"
            )
        if self.verify_width is not None and self.verify_width < self.num_nodes:
            raise ValueError(
                f"a tree of {self.num_nodes} nodes does not fit verify_width {self.verify_width}"
            )

    def _proposals(self) -> tuple[Proposal, ...]:
        """The proposals that the acceptance rule allows, the best first."""
        if isinstance(self.acceptance, str):
            return sound_proposals(self.acceptance, self.is_chain)
        return self.acceptance.proposals(self.is_chain)

    @property
    def resolved_proposal(self) -> Proposal:
        return self.proposal or self._proposals()[0]

    @property
    def scratch_slots(self) -> int:
        return max(super().scratch_slots, self.verify_width or 0)

    def with_shape(self, shape: TreeShape) -> "SpeculationConfig":
        """The same rules with a smaller tree shape.

        Raises ValueError for a shape that is larger than this one, or that the proposal does not
        support.
        """
        if shape.num_nodes > self.num_nodes or shape.max_depth > self.max_depth:
            raise ValueError(
                f"a tree of {shape.num_nodes} nodes and depth {shape.max_depth} is larger than the "
                f"engine has room for: {self.num_nodes} nodes, depth {self.max_depth}"
            )
        if shape.scratch_slots > self.scratch_slots:
            raise ValueError(
                f"drafting a tree of top_k {shape.top_k} and depth {shape.max_depth} needs "
                f"{shape.scratch_slots} slots, the engine has room for {self.scratch_slots}"
            )
        proposal = None if shape.is_plain else self.proposal
        return dataclasses.replace(
            self,
            num_nodes=shape.num_nodes,
            max_depth=shape.max_depth,
            top_k=shape.top_k,
            proposal=proposal,
        )

    @classmethod
    def chain(cls, num_tokens: int, acceptance: Acceptance | Any = "match") -> "SpeculationConfig":
        """A chain of ``num_tokens`` drafted tokens; 0 is plain decoding."""
        return cls(num_nodes=num_tokens + 1, max_depth=num_tokens, top_k=1, acceptance=acceptance)


def default_speculation(platform: str) -> SpeculationConfig:
    """The tree when none is asked for, by measurement (docs/benchmarks.md, "Which tree").

    On a CPU, where every node costs time, a chain of 5 was the fastest; on a GPU, at small batches,
    one of 7. Other platforms get the CPU's default until they are measured.
    """
    return SpeculationConfig.chain(7 if platform == "gpu" else 5)
