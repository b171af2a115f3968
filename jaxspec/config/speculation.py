"""Shapes of draft trees, acceptance rules and ways to choose draft tokens."""

import dataclasses
from typing import Any, Literal, get_args

Acceptance = Literal["match", "rejection"]
Proposal = Literal["top_k", "coupled", "sampled"]
FIRST_ACCEPTANCE = 0.85  # of chains, before anything was seen: what is tried is soon known
# A tree misses where several candidates miss. With the built-in pair, a chain of 5 and a tree of 60
# nodes miss 0.32 and 0.15 of the tokens (docs/benchmarks.md): 0.32 to the power of 1.7.
TREE_POWER = 1.5
SHORT_CHAIN, CHAIN, LONG_CHAIN = 3, 7, 9  # drafted tokens of the default trees


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
                f"num_nodes {self.num_nodes} and max_depth {self.max_depth} with top_k 1: a chain "
                f"of depth {self.max_depth} has {self.max_depth + 1} nodes, the root included; "
                "give a top_k above 1 for a tree"
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

    @property
    def name(self) -> str:
        """The text that ``parse`` reads as this shape."""
        if self.is_plain:
            return "plain"
        if self.is_chain:
            return f"chain:{self.max_depth}"
        return f"{self.num_nodes}:{self.max_depth}:{self.top_k}"

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


def check_rule(rule: object) -> None:
    """Raise ValueError for what is no acceptance rule: a class, an object without the methods of
    speculation.acceptance.AcceptanceRule, or one that cannot be hashed."""
    kind = rule if isinstance(rule, type) else type(rule)
    methods = [name for name in ("proposals", "accept") if not callable(getattr(rule, name, None))]
    if isinstance(rule, type) and not methods:
        raise ValueError(
            f"acceptance is the class {kind.__name__}: give an object, {kind.__name__}()"
        )
    if len(methods) == 2:
        shown = f"{rule!r:.60}" if kind.__module__ == "builtins" else kind.__name__
        raise ValueError(
            "acceptance must be match, rejection or an object with the methods proposals and "
            f"accept, got {shown}"
        )
    if methods:
        raise ValueError(
            f"acceptance rule {kind.__name__} has no method {methods[0]}: see AcceptanceRule"
        )
    try:
        hash(rule)
    except TypeError:
        raise ValueError(
            f"acceptance rule {kind.__name__} cannot be hashed, as an option of compiled programs "
            "must: make it a dataclass(frozen=True)"
        ) from None


@dataclasses.dataclass(frozen=True)
class SpeculationConfig(TreeShape):
    """The largest draft tree of an engine, and the rule that accepts its nodes.

    The shape is a capacity: the engine's state can hold such trees. A call drafts trees of this
    shape, unless it asks for a smaller one.

    Raises ValueError for a shape that is no tree, a rule without its methods, and a proposal that
    does not go with the rule.

    Attributes:
      acceptance: ``match`` commits the tokens that the target samples, so the text does not depend
        on the drafter. ``rejection`` is classical speculative sampling. Or pass your own rule
        (see decoding.acceptance.AcceptanceRule).
      proposal: how drafters with probabilities choose tokens. ``top_k`` takes the likeliest tokens.
        ``coupled`` ranks tokens with the target's sampling noise added (not under ``rejection``;
        equal to ``top_k`` at temperature 0). ``sampled`` draws from the drafter's distribution
        (only for chains under ``rejection``). None: the first proposal that the rule allows.
      verify_width: pad every verification (also in plain decoding) to this many nodes, make its
        attention sums independent of slot order, and compile without dropped roundings, timed
        kernels and fusion between blocks. In bf16 the text then does not depend on the tree, in the
        same batch bucket; with EngineConfig.deterministic in any batch.
    """

    acceptance: Acceptance | Any = "match"
    proposal: Proposal | None = None
    verify_width: int | None = None

    def __post_init__(self):
        super().__post_init__()
        allowed = self._proposals()
        if self.proposal is not None and self.proposal not in get_args(Proposal):
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
        check_rule(self.acceptance)
        allowed = self.acceptance.proposals(self.is_chain)
        known = get_args(Proposal)
        if not (isinstance(allowed, tuple | list) and allowed and {*allowed} <= {*known}):
            raise ValueError(
                f"{type(self.acceptance).__name__}.proposals must return a tuple of "
                f"{', '.join(known)}, got {allowed!r}"
            )
        return tuple(allowed)

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
                f"engine's largest, which has {self.num_nodes} nodes and depth {self.max_depth}"
            )
        if shape.scratch_slots > self.scratch_slots:
            raise ValueError(
                f"drafting a tree of top_k {shape.top_k} and depth {shape.max_depth} needs "
                f"{shape.scratch_slots} slots, the engine has {self.scratch_slots}"
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


def default_speculation(
    platform: str,
    *,
    built_in: bool,
    acceptance: Acceptance | Any = "match",
    verify_width: int | None = None,
) -> SpeculationConfig:
    """The default tree, measured with the small built-in model (docs/benchmarks.md, "Which tree").

    At temperature 0.5 and small batches a chain of 7 was among the fastest on two CPU cores and on
    a GPU. On a CPU the built-in pair was as fast with a chain of 9 there, and faster at temperature
    0: its head ends unlikely chains early. Other pairs draft 3 tokens on a CPU, where a pass over
    8 tokens of a row costs twice one over a single token: SmolLM2-135M, 41 tokens/s without a
    drafter, wrote 28 and 64 on two chats so (1.38 and 2.94 tokens a round), and 12 on the first
    with a chain of 7. A larger model, or another head, may be faster with another tree.

    Args:
      platform: of the devices: ``cpu``, ``gpu`` or ``tpu``.
      built_in: the built-in model drafts with its default drafter.
      acceptance, verify_width: see SpeculationConfig. Chains end early with ``match`` only.
    """
    if platform == "cpu" and not built_in:
        return SpeculationConfig.chain(SHORT_CHAIN)
    ends_early = platform == "cpu" and acceptance == "match"
    fits = verify_width is None or verify_width > LONG_CHAIN
    return SpeculationConfig.chain(LONG_CHAIN if ends_early and fits else CHAIN)


def default_drafting_rows(platform: str) -> int | None:
    """Rows of a call up to which the default tree is drafted; None: any number.

    On a CPU a drafted token costs nearly as much as one decoded plainly once there are many rows.
    The default tree of the built-in model ran at 1.41, 0.99 and 0.62 times the speed of plain
    decoding with 4, 16 and 64 rows at temperature 0, and at 0.64, 0.49 and 0.38 times at
    temperature 1 (docs/drafters.md, "On two CPU cores").
    """
    return 4 if platform == "cpu" else None


def default_verify_width(platform: str) -> int:
    """The nodes of the largest default tree."""
    return 1 + (LONG_CHAIN if platform == "cpu" else CHAIN)
