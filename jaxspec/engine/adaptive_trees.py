"""Which draft tree each call of an engine uses: the link between its plans and the policy."""

import collections
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.decoding.choose_shape import choices
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.prior_costs import prior_costs
from jaxspec.decoding.state import Emitted
from jaxspec.engine.crowds import Crowds
from jaxspec.engine.emitted import RowOutput, row_outputs
from jaxspec.engine.limits import adapts, learns_costs
from jaxspec.engine.plans.runner import Launched
from jaxspec.engine.plans.sequences import generation_of, kind_of
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Load, RoundsKey, compiles_alone
from jaxspec.engine.warm_up.compile_all import Coverage, Progress, compile_all, coverage
from jaxspec.engine.warm_up.measure_costs import measure_rounds
from jaxspec.scheduling import sequence as scheduling
from jaxspec.scheduling.acceptance_estimate import AcceptanceEstimate
from jaxspec.scheduling.plan import Limits, Plan
from jaxspec.scheduling.round_costs import LearntCosts, VerifiedCosts
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.tree_policy import SHORT_CALL, TreePolicy

# Chains and the most trees of engines that never learn what rounds cost: each tree is compiled as
# soon as it is chosen. On accelerators a chain of 2 is the best for 64 rows.
ESTIMATED_CHAINS, ESTIMATED_TREES = (1, 2, 3), 3
HYSTERESIS = 0.03  # costs are learnt from calls, whose times differ a little
PATIENCE = 60.0  # seconds of rounds for each tree that is compiled only because it might be better
LONG_RUN = 2.0  # seconds of rounds before any tree is compiled beside them: a run that ends sooner
# would be slowed by a program that it does not use, and would wait for it at its end


def shapes_to_choose(
    params: EngineParams, config: EngineConfig, learns: bool
) -> tuple[TreeShape, ...]:
    """The trees of an adaptive engine, plain decoding first; ``learns``: what rounds cost.

    Raises ValueError if nothing can be drafted, or a tree is too large for the engine.
    """
    if params.round_options().speculation.is_plain:
        raise ValueError("adaptive needs a drafter, and a tree that drafts tokens: there is none")
    if config.shapes is not None:
        return tuple(dict.fromkeys([PLAIN, *(_checked(params, shape) for shape in config.shapes)]))
    if learns:
        return choices(params)
    largest = choices(params, ESTIMATED_CHAINS)[-ESTIMATED_TREES:]
    return tuple(dict.fromkeys([PLAIN, *largest]))


def _checked(params: EngineParams, shape: TreeShape) -> TreeShape:
    try:
        return params.round_options(shape).speculation.shape
    except ValueError as error:
        raise ValueError(f"shapes: {shape.name} does not fit the engine: {error}") from None


class AdaptiveTrees:
    """The trees of an engine's calls: a fixed one, or what a policy chooses.

    The policy looks at calls of the past only, never at a draw that decides what is to come. So it
    is lossless under every acceptance rule.

    Attributes:
      choices: the shapes to choose from; None: the engine does not adapt.
      policy: what chooses, and what it has learnt; None: the engine does not adapt.
      costs: of rounds, by rows of the program (of each shard) and shape: what is expected of as
        many tokens as rounds verify, or was measured by warm_up, and if it ``learns``, corrected by
        the calls that serve.
      crowds: what decides when the drafter is left out.
      rounds: rounds that calls have run so far, by shape.

    Raises ValueError for choices that cannot work.
    """

    def __init__(self, programs: Programs, limits: Limits, config: EngineConfig):
        self.programs, self.limits, params = programs, limits, programs.params
        self.crowds = Crowds(programs, limits)
        self.learns = learns_costs(params, config)
        self.choices = (
            shapes_to_choose(params, config, self.learns) if adapts(params, config) else None
        )
        self._verified = VerifiedCosts(prior_costs(params.target, params.drafter))
        self.costs = LearntCosts(self._verified)
        self.rounds: collections.Counter[TreeShape] = collections.Counter()
        self.policy: TreePolicy | None = None
        self._measures = bool(config.adaptive)
        self._served = 0.0  # seconds of rounds, as far as their costs are known
        self._tried = 0.0  # the same, when the last tree was compiled only to be tried
        self.restart()

    @property
    def adapts_by_time(self) -> bool:
        """Whether what calls took decides the trees of later ones."""
        return self.choices is not None and self.learns

    @property
    def known(self) -> tuple[TreeShape, ...]:
        """Shapes that calls choose from; where the engine does not adapt, its one shape."""
        return self.choices or (self._resolved(None),)

    def compiled_ahead(self, shape: TreeShape | None) -> tuple[TreeShape, ...]:
        """Shapes whose programs are compiled before the load comes. An engine that nobody asked to
        adapt compiles others beside its work, if it learns that they pay."""
        if self.choices is None:
            return (self._resolved(shape),)
        if self._measures or not self.learns:
            return self.choices
        return PLAIN, self._resolved(None)

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
        shapes = self.compiled_ahead(shape)
        if any(params.plain for params in sampling):
            shapes = tuple(dict.fromkeys([*shapes, PLAIN]))
        cover = coverage(self.programs, self.limits, shapes, sampling, tokens, rows)
        compile_all(self.programs, cover, on_progress)
        if self._measures:
            self.costs = LearntCosts(measure_rounds(self.programs, cover))
            self.restart()
        return cover

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Seconds of a round, as far as it is known."""
        return self.costs.seconds(rows, shape)

    @property
    def call_seconds(self) -> float:
        """Seconds of a call besides its rounds; 0 before it was measured."""
        return self.costs.call

    def restart(self) -> None:
        """Forget what was accepted, as when the weights have changed. The costs stay."""
        if self.choices is not None:
            # Where programs have a fixed number of rounds, fewer are calls of one round each.
            short = self.programs.sizes.fixed_rounds or SHORT_CALL
            listens = self.learns and self.programs.params.drafter.listens
            options = {"hysteresis": HYSTERESIS, "short_call": short, "listens": listens}
            self.policy = TreePolicy(self.choices, **options)

    def _resolved(self, shape: TreeShape | None) -> TreeShape:
        return self.programs.params.round_options(shape).speculation.shape

    def plan(
        self,
        scheduler: Scheduler,
        load: Load,
        shape: TreeShape | None,
        most_rounds: int | None,
        *,
        reads_only: bool,
    ) -> Plan:
        """What the device does next, of at most so many rounds; see Scheduler.plan. Without the
        drafter in a crowd, unless there is to be one ``shape``: the ``load`` says so, too."""
        policy, undrafted = self.policy, False
        if shape is None and policy is not None:
            undrafted = self.crowds.leave_drafter_out(scheduler, load, policy, self.costs)
        few = None if undrafted or policy is None else policy.most_rounds
        known = [rounds for rounds in (most_rounds, few) if rounds is not None]
        most, now = min(known, default=None), time.perf_counter()
        load.undrafted = scheduler.undrafted = undrafted
        return scheduler.plan(now, most, reads_only=reads_only)

    def choose(self, plan: Plan, load: Load, shape: TreeShape | None) -> TreeShape:
        """The tree of a plan's rounds: ``shape``, or if it is None, the policy's or the largest.

        Requests that are all plain get none, nor do unread rows. Before any round has run it may be
        asked for those that will follow a plan that only reads.
        """
        if plan.undrafted:
            return PLAIN
        rows = plan.decode_rows or plan.masked_rows
        if not rows and not self.rounds:
            rows = [read.row for read in plan.reads]
        running = [plan.sequences[row] for row in {*rows, *plan.masked_rows}]
        if running and all(generation_of(sequence).sampling.plain for sequence in running):
            return PLAIN
        if shape is not None or self.policy is None or not rows:
            return self._resolved(shape)
        calls = _Calls(rows, running, load, max(1, plan.rounds), masked=bool(plan.masked_rows))
        by_readiness = self.programs.ask is not None or self.programs.sealed
        shapes = self.policy.shapes if by_readiness else (PLAIN,)
        targets = {each: self._program(calls, each) for each in shapes}
        chosen = self.policy.choose(
            [sequence.request_id for sequence in running],
            self.costs,
            rounds=calls.rounds,
            size=targets[PLAIN].rows,
            ready=self._ready(targets),
        )
        self._ask(targets)
        return chosen

    def _program(self, calls: "_Calls", shape: TreeShape) -> RoundsKey:
        tokens = max(sequence.limit for sequence in calls.running)
        rounds = fixed = self.programs.sizes.fixed_rounds
        if fixed:
            rounds = fixed if calls.rounds >= fixed else 1
        return self.programs.rounds_key(
            calls.rows,
            tokens,
            calls.load,
            shape,
            kind_of(calls.running),
            masked=calls.masked,
            rounds=0 if calls.masked else rounds,
        )

    def _ready(self, targets: Mapping[TreeShape, RoundsKey]) -> dict[TreeShape, int] | None:
        """The shapes that can run at once, with the rows of their programs. None: all are taken as
        ready: they are compiled when they run, or nothing can run yet."""
        if len(targets) == 1:
            return None
        found = {shape: self.programs.stand_in(key) for shape, key in targets.items()}
        return {shape: key.rows for shape, key in found.items() if key is not None} or None

    def _ask(self, targets: Mapping[TreeShape, RoundsKey]) -> None:
        """Let another thread compile what the policy wants: the best shape at once, and now and
        then one that only may be better."""
        assert self.policy is not None
        wanted, programs = self.policy.wanted, self.programs
        if wanted is None or programs.ask is None or not compiles_alone(targets[wanted]):
            return
        if wanted == self.policy.best and self._served >= LONG_RUN:
            if programs.ask(targets[wanted]):
                self.policy.began_to_compile()
        elif self._served >= self._tried + PATIENCE and programs.ask(targets[wanted]):
            self._tried = self._served

    def observe(self, launched: Launched, running: Container[str], seconds: float | None) -> None:
        """Learn from what the calls of a plan emitted, of requests that are still running, and from
        the ``seconds`` that its rounds took, if they are known. Nothing from unread rows: their
        plain rounds took less than those of others."""
        plan, shape = launched.plan, launched.shape
        if plan.undrafted:
            before = self._served
            for call in launched.calls:
                self._count(shape, int(call.emitted.num_rounds), len(call.rows))
            self.crowds.observe(self._served - before)
            return
        if seconds is not None and self.adapts_by_time and len(launched.calls) == 1:
            [call] = launched.calls
            rows = len(call.rows) // self.programs.shards
            self.costs.observe(rows, shape, int(call.emitted.num_rounds), seconds)
        for call in launched.calls:
            if not call.emitted.num_rounds:  # it read prompts
                continue
            self._count(shape, int(call.emitted.num_rounds), len(call.rows))
            ran = np.asarray(call.emitted.counts) > 0
            self._verified.observe(shape, np.asarray(call.emitted.drafted)[ran])
            if self.policy is not None and shape in self.policy.shapes:
                outputs = row_outputs([call], plan.sequences)
                outputs = [each for each in outputs if each.sequence.request_id in running]
                _observe(self.policy.estimate, call.emitted, shape, outputs)

    def _count(self, shape: TreeShape, rounds: int, rows: int) -> None:
        """A call of so many rows has run rounds."""
        self.rounds[shape] += rounds
        if self.choices is not None:
            seconds = self.costs.seconds(rows // self.programs.shards, shape)
            self._served += rounds * seconds

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if self.policy is not None:
            self.policy.estimate.forget(request_id)


def _observe(
    estimate: AcceptanceEstimate, emitted: Emitted, shape: TreeShape, outputs: Sequence[RowOutput]
) -> None:
    """Learn from these rows of a call."""
    rows = [output.sequence.request_id for output in outputs]
    columns = [output.column for output in outputs]
    if emitted.heard is not None:
        estimate.hear(rows, np.asarray(emitted.heard)[columns])
    if emitted.heard is None or not shape.is_plain:
        arrays = emitted.accepted, emitted.counts
        estimate.observe(rows, shape, *(np.asarray(array)[:, columns] for array in arrays))


class _Calls(NamedTuple):
    """What is known of a plan's calls of rounds before their shape is.

    Attributes:
      masked: the host restricts their tokens.
    """

    rows: Sequence[int]
    running: Sequence[scheduling.Sequence]
    load: Load
    rounds: int
    masked: bool
