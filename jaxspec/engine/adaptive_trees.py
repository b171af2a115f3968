"""Which draft tree each call of an engine uses: the link between its plans and the policy."""

import collections
from collections.abc import Container, Iterable, Sequence

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.emitted import row_outputs
from jaxspec.engine.plans.runner import Launched
from jaxspec.engine.plans.sequences import generation_of
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.warm_up.compile_all import Coverage, Progress, compile_all, coverage
from jaxspec.engine.warm_up.measure_costs import measure_rounds
from jaxspec.scheduling.plan import Limits, Plan
from jaxspec.scheduling.tree_policy import SHORT_CALL, RoundCosts, TreePolicy

CHAINS = (1, 3, 5)  # tokens of the chains that are choices by default


def shapes_to_choose(params: EngineParams, config: EngineConfig) -> tuple[TreeShape, ...]:
    """The trees of an adaptive engine, plain decoding first.

    Raises ValueError if nothing can be drafted, or a tree is too large for the engine.
    """
    largest = params.round_options().speculation.shape
    if largest.is_plain:
        raise ValueError("adaptive needs a drafter, and a tree that drafts tokens: there is none")
    if config.shapes is not None:
        return tuple(dict.fromkeys([PLAIN, *(_checked(params, shape) for shape in config.shapes)]))
    chains = [TreeShape(k + 1, k, 1) for k in CHAINS if k < largest.max_depth]
    return (PLAIN, *chains, largest)


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
      policy: what chooses, and what it has learnt; None: nothing is measured yet.
      costs: measured costs of rounds, by rows of the program (of each shard) and shape; None: they
        are not measured yet.
      rounds: rounds that calls have run so far, by shape.

    Raises ValueError for choices that cannot work.
    """

    def __init__(self, programs: Programs, limits: Limits, config: EngineConfig):
        self.programs, self.limits = programs, limits
        adaptive = config.adaptive
        self.choices = shapes_to_choose(programs.params, config) if adaptive else None
        self.policy: TreePolicy | None = None
        self.rounds: collections.Counter[TreeShape] = collections.Counter()
        self.costs: RoundCosts | None = None
        self._sizes: tuple[int, ...] = ()  # rows of programs, of each shard

    @property
    def known(self) -> tuple[TreeShape, ...]:
        """Shapes that calls choose from; where the engine does not adapt, its one shape."""
        return self.choices or (self._resolved(None),)

    @property
    def must_be_measured(self) -> bool:
        return self.choices is not None and self.costs is None

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
        if any(params.plain for params in sampling):
            shapes = tuple(dict.fromkeys([*shapes, PLAIN]))
        cover = coverage(self.programs, self.limits, shapes, sampling, tokens, rows)
        compile_all(self.programs, cover, on_progress)
        if self.choices is not None:
            self.costs, self._sizes = measure_rounds(self.programs, cover), cover.sizes
            self.restart()
        return cover

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Seconds of a round, as it was measured. Raises RuntimeError before that."""
        if self.costs is None:
            raise RuntimeError("the costs of rounds are not known yet: call warm_up")
        return self.costs.seconds(rows, shape)

    @property
    def call_seconds(self) -> float:
        """Seconds of a call besides its rounds; 0 before it was measured."""
        return 0.0 if self.costs is None else self.costs.call

    def restart(self) -> None:
        """Forget what was accepted, as when the weights have changed. The costs stay."""
        if self.choices is not None and self.costs is not None:
            # Where programs have a fixed number of rounds, fewer are calls of one round each.
            short = self.programs.sizes.fixed_rounds or SHORT_CALL
            self.policy = TreePolicy(self.choices, short_call=short)

    def _resolved(self, shape: TreeShape | None) -> TreeShape:
        return self.programs.params.round_options(shape).speculation.shape

    def most_rounds(self, asked: int | None) -> int | None:
        """Most rounds of the next call; fewer than ``asked`` while too little is known."""
        limits = [asked, None if self.policy is None else self.policy.most_rounds]
        return min((rounds for rounds in limits if rounds is not None), default=None)

    def choose(self, plan: Plan, shape: TreeShape | None) -> TreeShape:
        """The tree of a plan's rounds: ``shape``, or if it is None, the policy's or the largest.

        Requests that are all plain get none.
        """
        rows = plan.decode_rows or plan.masked_rows
        running = [plan.sequences[row] for row in (*plan.decode_rows, *plan.masked_rows)]
        if running and all(generation_of(sequence).sampling.plain for sequence in running):
            return PLAIN
        if shape is not None or self.policy is None or self.costs is None or not rows:
            return self._resolved(shape)
        keys = [sequence.request_id for sequence in running]
        least = self.programs.sizes.size_for(rows)
        size = min((size for size in self._sizes if size >= least), default=least)
        return self.policy.choose(keys, self.costs, rounds=max(1, plan.rounds), size=size)

    def observe(self, launched: Launched, running: Container[str]) -> None:
        """Learn from what the calls of a plan emitted, of requests that are still running."""
        plan, shape = launched.plan, launched.shape
        for call in launched.calls:
            if not call.emitted.num_rounds:  # it read prompts
                continue
            self.rounds[shape] += int(call.emitted.num_rounds)
            if self.policy is not None and shape in self.policy.shapes:
                outputs = row_outputs([call], plan.sequences)
                outputs = [each for each in outputs if each.sequence.request_id in running]
                arrays = call.emitted.accepted, call.emitted.counts
                columns = [output.column for output in outputs]
                self.policy.estimate.observe(
                    [output.sequence.request_id for output in outputs],
                    shape,
                    *(np.asarray(array)[:, columns] for array in arrays),
                )

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if self.policy is not None:
            self.policy.estimate.forget(request_id)
