"""What a model is and how it is served: frozen, hashable values."""

import dataclasses
from typing import Literal

Acceptance = Literal["match", "rejection", "synthetic"]
Proposal = Literal["top_k", "coupled", "sampled"]


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent rope scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer; families differ only in these values.

    ``sliding_windows`` has one entry a layer: the number of latest positions (the token's own
    included) that the layer attends to, or None for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    sliding_windows: tuple[int | None, ...]
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"sliding_windows has {len(self.sliding_windows)} entries "
                f"for {self.num_layers} layers"
            )

    def check_tree_depth(self, max_depth: int) -> None:
        """Raises ValueError unless a tree of ``max_depth`` lies inside every sliding window: the
        tree mask shows a node all its ancestors."""
        narrowest = min((w for w in self.sliding_windows if w is not None), default=None)
        if narrowest is not None and narrowest <= max_depth:
            raise ValueError(
                f"a tree of depth {max_depth} does not fit the model's sliding window of "
                f"{narrowest} positions: choose a smaller depth"
            )


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Geometry of the paged KV cache.

    ``max_length`` counts a sequence's prompt and generated tokens; ``num_pages`` bounds the pages
    of all sequences together, None: as many as a batch needs.
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


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """Shape of the draft tree and the rule that accepts its nodes.

    Attributes:
      num_nodes: nodes of the tree, the root (the last committed token) included.
      max_depth: depth of the deepest node; a chain of ``k`` drafted tokens has ``max_depth = k``.
      top_k: children tried for each expanded node; 1 makes a chain.
      acceptance: ``match`` commits what the target samples at each node (the text does not depend
        on the drafter); ``rejection`` is classical speculative sampling; ``synthetic`` accepts a
        fixed number of tokens whatever they are, for timing only: its text means nothing.
      proposal: how drafters that give probabilities choose tokens. ``top_k`` takes the likeliest,
        ``coupled`` ranks them under the target's own sampling noise (not under ``rejection``;
        same as ``top_k`` at temperature 0), ``sampled`` draws from the drafter (chains under
        ``rejection`` only).
        None picks ``coupled`` for ``match``; for ``rejection``, ``sampled`` for a chain and
        ``top_k`` for a tree.
      verify_width: pad every verification, plain decoding's too, to this many nodes and make
        attention sums independent of slot order, so that in bf16 the text does not depend on the
        tree either.
      synthetic_length: mean acceptance length (bonus token included) under ``synthetic``.
    """

    num_nodes: int = 6
    max_depth: int = 5
    top_k: int = 1
    acceptance: Acceptance = "match"
    proposal: Proposal | None = None
    verify_width: int | None = None
    synthetic_length: float | None = None

    def __post_init__(self):
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
        self._check_rules()

    def _check_rules(self):
        if self.acceptance not in ("match", "rejection", "synthetic"):
            raise ValueError(f"acceptance must be match or rejection, got {self.acceptance!r}")
        if self.proposal not in (None, "top_k", "coupled", "sampled"):
            raise ValueError(f"proposal must be top_k, coupled or sampled, got {self.proposal!r}")
        if self.proposal == "sampled" and (self.acceptance == "match" or not self.is_chain):
            raise ValueError(
                "proposal 'sampled' needs acceptance 'rejection' and a chain (top_k 1)"
            )
        if self.proposal == "coupled" and self.acceptance == "rejection":
            raise ValueError(
                "proposal 'coupled' follows the target's noise, which acceptance 'rejection' does "
                "not look at; use 'sampled' or 'top_k'"
            )
        if self.verify_width is not None and self.verify_width < 1:
            raise ValueError(f"verify_width must be at least 1, got {self.verify_width}")
        if (self.acceptance == "synthetic") != (self.synthetic_length is not None):
            raise ValueError("synthetic_length goes with acceptance 'synthetic', and only with it")

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def resolved_proposal(self) -> Proposal:
        if self.proposal is not None:
            return self.proposal
        if self.acceptance != "rejection":
            return "coupled"
        return "sampled" if self.is_chain else "top_k"

    @property
    def scratch_slots(self) -> int:
        """Slots past the context that a round may write: the tree's, or the drafter's levels."""
        return max(self.num_nodes, self.verify_width or 0, 1 + self.top_k * self.max_depth)

    @classmethod
    def chain(cls, num_tokens: int, acceptance: Acceptance = "match") -> "SpeculationConfig":
        """A chain of ``num_tokens`` drafted tokens."""
        return cls(num_nodes=num_tokens + 1, max_depth=num_tokens, top_k=1, acceptance=acceptance)

    @classmethod
    def parse(cls, text: str) -> "SpeculationConfig":
        """``chain:K`` or ``tree:NODES:DEPTH:TOPK``, as the command lines write trees.

        Raises ValueError for anything else.
        """
        kind, *sizes = text.split(":")
        try:
            match kind, [int(size) for size in sizes]:
                case "chain", [tokens]:
                    return cls.chain(tokens)
                case "tree", [nodes, depth, top_k]:
                    return cls(num_nodes=nodes, max_depth=depth, top_k=top_k)
        except ValueError as error:
            raise ValueError(f"tree {text!r}: {error}") from None
        raise ValueError(f"{text!r} is not chain:K or tree:NODES:DEPTH:TOPK")


def default_speculation(platform: str) -> SpeculationConfig:
    """The tree when none is asked for, by measurement (README, "Which tree").

    A CPU pays for every node: a chain of 5 was the fastest there. On a GPU a longer chain costs
    little more than a shorter one, and was the fastest at small batches. Others take a CPU's until
    they are measured.
    """
    return SpeculationConfig.chain(7 if platform == "gpu" else 5)
