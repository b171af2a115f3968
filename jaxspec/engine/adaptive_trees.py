"""Which draft tree each call of an engine uses: the link between its plans and the policy."""

import collections
from collections.abc import Container, Iterable, Sequence

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.plans.structured_rounds import sampling_of
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.warm_up.compile_all import Coverage, Progress, compile_all, coverage
from jaxspec.engine.warm_up.measure_costs import measure_rounds
from jaxspec.scheduling.plan import Limits, Plan
from jaxspec.scheduling.tree_policy import SHORT_CALL, RoundCosts, ShapePolicy

CHAINS = (1, 3, 5)  # tokens of the chains that are choices by default


def shapes_to_choose(params: EngineParams, config: EngineConfig) -> tuple[TreeShape, ...]:
    """The trees of an adaptive engine, plain decoding first.

    Raises ValueError if nothing can be drafted, or a tree is too large for the engine.
    """
    largest = params.round_options().speculation.shape
    if largest.is_plain:
        raise ValueError("adaptive needs a drafter, and a tree that drafts tokens: there is none")
    if config.shapes is not None:
        return tuple(dict.fromkeys([PLAIN, *(_checked(params, one) for one in config.shapes)]))
    chains = [TreeShape(k + 1, k, 1) for k in CHAINS if k < largest.max_depth]
    return (PLAIN, *chains, largest)


def _checked(params: EngineParams, shape: TreeShape) -> TreeShape:
    try:
        return params.round_options(shape).speculation.shape
    except ValueError as error:
        raise ValueError(f"shapes: {shape.name} does not fit the engine: {error}") from None


class CallShapes:
    """The trees of an engine's calls: a fixed one, or what a policy chooses.

    The policy looks at calls of the past only, and of a drafter's confidence at no depth past the
    token that a round ended with: never at a draw that decides what is to come. So it is lossless
    under every acceptance rule.

    Attributes:
      choices: the shapes to choose from; None: the engine does not adapt.
      policy: what chooses, and what it has learnt; None: nothing is measured yet.
      rounds: rounds that calls have run so far, by shape.

    Raises ValueError for choices that cannot work.
    """

    def __init__(self, programs: Programs, limits: Limits, config: EngineConfig):
        self.programs, self.limits = programs, limits
        adaptive = config.adaptive
        self.choices = shapes_to_choose(programs.params, config) if adaptive else None
        self.policy: ShapePolicy | None = None
        self.rounds: collections.Counter[TreeShape] = collections.Counter()
        self._costs: RoundCosts | None = None
        self._sizes: tuple[int, ...] = ()  # rows of programs, of each shard

    @property
    def known(self) -> tuple[TreeShape, ...]:
        """Those that calls choose from; of an engine that does not adapt, its own."""
        return self.choices or (self._resolved(None),)

    @property
    def must_be_measured(self) -> bool:
        return self.choices is not None and self._costs is None

    def prepare(
        self,
        sampling: Sequence[SamplingParams],
        shape: TreeShape | None,
        tokens: int | None,
        rows: Iterable[int] | None = None,
        on_progress: Progress | None = None,
    ) -> Coverage:
        """Compile and measure, while no row is in use and no page is known; see Engine.warm_up.

        Returns what programs are ready for.
        """
        shapes = self.choices or (self._resolved(shape),)
        if any(one.plain for one in sampling):
            shapes = tuple(dict.fromkeys([*shapes, PLAIN]))
        cover = coverage(self.programs, self.limits, shapes, sampling, tokens, rows)
        compile_all(self.programs, cover, on_progress)
        if self.choices is not None:
            self._costs, self._sizes = measure_rounds(self.programs, cover), cover.sizes
            self.restart()
        return cover

    def set_costs(self, costs: RoundCosts) -> None:
        """Choose by these costs of a round, by rows of the program (of each shard) and shape."""
        self._costs = costs

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Of a round, as it was measured. Raises RuntimeError before that."""
        if self._costs is None:
            raise RuntimeError("the costs of rounds are not known yet: call warm_up")
        return self._costs.seconds(rows, shape)

    @property
    def call_seconds(self) -> float:
        """Of a call besides its rounds; 0 before it was measured."""
        return 0.0 if self._costs is None else self._costs.call

    def restart(self) -> None:
        """Forget what was accepted, as when the weights have changed. The costs stay."""
        if self.choices is not None and self._costs is not None:
            # Where programs have a fixed number of rounds, fewer are calls of one round each.
            short = self.programs.sizes.fixed_rounds or SHORT_CALL
            self.policy = ShapePolicy(self.choices, short_call=short)

    def _resolved(self, shape: TreeShape | None) -> TreeShape:
        return self.programs.params.round_options(shape).speculation.shape

    def most_rounds(self, asked: int | None) -> int | None:
        """Most rounds of the next call; fewer than ``asked`` while too little is known."""
        own = None if self.policy is None else self.policy.most_rounds
        return min((rounds for rounds in (asked, own) if rounds is not None), default=None)

    def choose(self, plan: Plan, shape: TreeShape | None) -> TreeShape:
        """The tree of a plan's rounds: ``shape``, or if it is None, the policy's or the largest.

        Requests that are all plain get none.
        """
        rows = plan.decode_rows or plan.masked_rows
        running = [plan.sequences[row] for row in (*plan.decode_rows, *plan.masked_rows)]
        if running and all(sampling_of(sequence).plain for sequence in running):
            return PLAIN
        if shape is not None or self.policy is None or self._costs is None or not rows:
            return self._resolved(shape)
        keys = [sequence.request_id for sequence in running]
        least = self.programs.sizes.size_for(rows)
        size = min((own for own in self._sizes if own >= least), default=least)
        return self.policy.choose(keys, self._costs, rounds=max(1, plan.rounds), size=size)

    def observe(
        self, plan: Plan, shape: TreeShape, calls: Sequence[LaunchedCall], running: Container[str]
    ) -> None:
        """Learn from what the calls of a plan emitted, of requests that are still running."""
        for call in calls:
            if not call.emitted.num_rounds:  # it read prompts
                continue
            self.rounds[shape] += int(call.emitted.num_rounds)
            if self.policy is not None and shape in self.policy.shapes:
                places = [
                    (place, plan.sequences[row].request_id)
                    for place, row in enumerate(call.rows.tolist())
                    if row in plan.sequences and plan.sequences[row].request_id in running
                ]
                self._learn(self.policy, shape, call, places)

    def _learn(
        self,
        policy: ShapePolicy,
        shape: TreeShape,
        call: LaunchedCall,
        places: list[tuple[int, str]],
    ) -> None:
        columns = [place for place, _ in places]
        accepted = np.asarray(call.emitted.accepted)[:, columns]
        committed = np.asarray(call.emitted.counts)[:, columns]
        told = call.emitted.confidence
        confidence = None if told is None else np.asarray(told)[:, columns]
        keys = [key for _, key in places]
        policy.observe(keys, shape, accepted, committed, confidence)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if self.policy is not None:
            self.policy.forget(request_id)
