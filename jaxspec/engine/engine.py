"""From requests to tokens: the scheduler's plans are carried out by compiled programs.

The host plans and launches a call while the device runs the one before, then reads its results.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.all_reduce_buffers import replacement
from jaxspec.decoding.drafters import Drafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.adaptive_trees import AdaptiveTrees
from jaxspec.engine.draft_watch import DraftWatch
from jaxspec.engine.emitted import take_calls
from jaxspec.engine.generation import FinishReason, Generation
from jaxspec.engine.host_drafter import HostDrafter
from jaxspec.engine.limits import engine_params, engine_sizes, scheduler_limits
from jaxspec.engine.old_texts import check_drafts, verified_kinds
from jaxspec.engine.plans.runner import Launched, PlanRunner
from jaxspec.engine.programs import verifying
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.engine.programs.pipeline.programs import single_process_programs
from jaxspec.engine.programs.several_processes import MakePrograms
from jaxspec.engine.programs.sizes import RoundsKey
from jaxspec.engine.programs.weights import as_loaded
from jaxspec.engine.request_checks import check_for_engine
from jaxspec.engine.requests import MakeMatcher, Requests
from jaxspec.engine.warm_up.compile_all import GREEDY_AND_SAMPLED, Progress
from jaxspec.engine.warm_up.compile_early import CompilesBeside, compile_first
from jaxspec.engine.warm_up.measure_costs import measure_preemption
from jaxspec.engine.weights.changes import WeightChanges
from jaxspec.engine.weights.in_flight import InFlight, rule_for
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.placement import committed
from jaxspec.scheduling.plan import Delivery, Plan
from jaxspec.scheduling.preemption_costs import PreemptionCosts
from jaxspec.scheduling.scheduler import Scheduler


class Engine:
    """Generates for many requests at once. Each gets the text that it would get alone.

    >>> engine.finish([generation := engine.add([1, 2, 3], SamplingParams(max_tokens=16))])
    >>> generation.token_ids

    Requests come and go at any time. ``add``, ``cancel`` and ``step`` belong to one thread.

    Args:
      params: as made by load.
      cache: geometry of the paged cache; ``max_length`` bounds every request.
      config: how many requests run together, and how.
      make_matcher: of a structured output, with all stop tokens of the model; see
        structured.GrammarCompiler. None: there are no such requests.
      make_programs: for several processes; see shared_programs.
      host_drafter: drafts for all requests, if the parameters have the drafter HostDrafted.

    Attributes:
      shape: of the draft trees; None: the largest, or what an adaptive engine chooses. In float32
        the text does not depend on it. It may be set at any time. A new shape compiles a program.
      shapes: what chooses them, with the rounds that each has run.
      watch: warns once if hardly any draft is accepted.
      weights: the version in use, and weights that wait until nobody needs the old ones.
      preemption_costs: what swapping and recomputing take, as far as it was measured.
      on_launch, on_read: called with calls that were launched; a plan and what its calls gave.

    Raises ValueError for values that cannot work, and for a cache that does not fit the device.
    """

    def __init__(
        self,
        params: EngineParams,
        cache: CacheConfig | None = None,
        config: EngineConfig | None = None,
        *,
        make_matcher: MakeMatcher | None = None,
        make_programs: MakePrograms = single_process_programs,
        host_drafter: HostDrafter | None = None,
    ):
        # Committed to their devices, as swapped weights are: else the first swap would recompile.
        params = jax.tree.map(committed, params)
        self.cache = CacheConfig() if cache is None else cache
        self.config = EngineConfig() if config is None else config
        params = engine_params(params, self.config)
        self.shape: TreeShape | None = None
        sizes = engine_sizes(params, self.cache, self.config)
        self.limits = scheduler_limits(params, sizes, self.config)
        self.programs = make_programs(params, sizes, self.config.max_programs)
        self.shapes = AdaptiveTrees(self.programs, self.limits, self.config)
        if self.shapes.adapts_by_time and self.programs.compiles_beside:
            self.programs.ask = CompilesBeside(self.programs)
        self.watch = DraftWatch(params.drafter)
        self.on_launch: Callable[[list[LaunchedCall]], None] | None = None
        self.on_read: Callable[[Plan, list[Delivery]], None] | None = None
        self.preemption_costs = PreemptionCosts()
        self.host_drafter = host_drafter
        self._requests = Requests(self.programs, make_matcher)
        self.weights = WeightChanges(self.programs, self.shapes, self.watch, self._requests)
        self._start()

    def _start(self) -> None:
        self.scheduler = Scheduler(self.limits, self.preemption_costs)
        self._runner = PlanRunner(self.programs, self.preemption_costs, self.host_drafter)
        self._in_flight: Launched | None = None

    @property
    def params(self) -> EngineParams:
        """The weights, and every static choice."""
        return as_loaded(self.programs.params)

    @property
    def version(self) -> int:
        """The version of the weights in use, from 0; see use_target."""
        return self.weights.version

    @property
    def is_idle(self) -> bool:
        return not self._requests.running

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, if only for requests that have ended."""
        return not self.scheduler.is_idle or self.weights.pending is not None

    @property
    def swapped_bytes(self) -> int:
        """Host memory that swapped requests use now."""
        return self._runner.swapped.bytes

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that snapshots of recurrent states use now."""
        return self._runner.snapshots.bytes

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Raise ValueError for requests that could not run."""
        model = self.params.target.config
        check_for_engine(prompts, sampling, model, self.limits, trees=self.config.trees)
        if drafts is not None:
            check_drafts(self.params, drafts, sampling)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return self._requests.stop_ids(params)

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout: float | None = None,
        group: str | None = None,
        streams: bool = False,
        draft: Sequence[int] = (),
    ) -> Generation:
        """Queue a request; without a seed it gets one of its own. Stop strings are left to LLM.

        Args:
          timeout: seconds after which it ends, with what it has.
          group: requests of one group and prompt share its pages.
          streams: its tokens are shown before it ends, and not taken back; see use_target.
          draft: token ids of an old text for the prompt. They are read like a prompt, and kept as
            far as the target writes the same: in float32 they change how fast the text comes.

        Raises ValueError for a request that could not run, and for several samples (see add_all);
        QueueFull if too many wait.
        """
        if sampling.num_samples > 1:
            raise ValueError("add starts one sample: use add_all for n or best_of above 1")
        self.check([prompt], [sampling], [draft])
        return self._add(self._requests.new(prompt, sampling, streams, draft), timeout, group)

    def _add(self, generation: Generation, timeout: float | None, group: str | None) -> Generation:
        request = generation.request(time.perf_counter(), timeout, group)
        self.scheduler.add(request)
        generation.version = self.version
        self._requests.add(generation, request)
        return generation

    def add_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        timeout: float | None = None,
        streams: bool = False,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[Generation]:
        """Queue requests, all or none of them; see add.

        Each gives as many generations as it has samples, one after the other; ``drafts``: for each
        of these. Equal prompts are read once, and share their pages.
        """
        self.check(prompts, sampling, drafts)
        added: list[Generation] = []
        try:
            for generation, group in self._requests.new_samples(prompts, sampling, streams, drafts):
                added.append(self._add(generation, timeout, group))
        except BaseException:
            for generation in added:
                self.cancel(generation)
            raise
        return added

    def cancel(self, generation: Generation, reason: FinishReason = "cancelled") -> None:
        """End a request with what it has; does nothing if it has ended."""
        if not generation.done:
            self.scheduler.cancel(generation.request_id)
            self._end(generation.request_id, reason)

    def step(self, most_rounds: int | None = None) -> None:
        """Launch the next calls, then wait for those before them and add what they emitted.

        Fewer rounds (``most_rounds``) give results sooner. Errors end all requests and are raised.
        """
        with self._ending_all_by_errors():
            self._step(most_rounds)
            self._change_weights()

    def _step(self, most_rounds: int | None = None) -> None:
        # The first tokens are read before the first program of rounds is compiled.
        first = not any(isinstance(key, RoundsKey) for key in self.programs.ready)
        load, asked = self._requests.load, (self.shape, most_rounds)
        plan = self.shapes.plan(self.scheduler, load, *asked, reads_only=first)
        for request_id in plan.timed_out:
            self._end(request_id, "timeout")
        shape = self._runner.structured.drafts.shape(self.shapes.choose(plan, load, self.shape))
        if first:
            compile_first(self.programs, plan, load, shape)
        calls = self._runner.launch(plan, load, shape)
        if calls and self.on_launch is not None:
            self.on_launch(calls)
        self._read()
        if plan.runs_model:  # masks of structured requests need what was just read
            calls = [*calls, *self._runner.structured.verify()]
            self._in_flight = Launched(plan, calls, shape)
        if first and plan.reads:
            self._read()
        for generation in self._runner.structured.take_failed():
            self.cancel(generation, "error")

    @contextlib.contextmanager
    def _ending_all_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def finish(
        self, generations: Iterable[Generation], on_step: Callable[[], None] | None = None
    ) -> None:
        """Step, and call ``on_step``, until these requests end; an interruption cancels them."""
        generations = list(generations)
        try:
            while not all(generation.done for generation in generations):
                self.step()
                if on_step is not None:
                    on_step()
        finally:
            for generation in generations:
                self.cancel(generation)

    def warm_up(
        self,
        sampling: Sequence[SamplingParams] = GREEDY_AND_SAMPLED,
        *,
        tokens: int | None = None,
        rows: Iterable[int] | None = None,
        old_texts: bool = False,
        on_progress: Progress | None = None,
    ) -> float:
        """Compile all programs of a load, so that nothing compiles while it is served.

        An engine with ``adaptive=True`` does so for each tree, and measures what a round costs; one
        that adapts by default and learns what trees cost, for its largest tree and plain decoding.
        What preemption costs is measured too, if that decides. What the prefix cache holds is
        forgotten.

        Args:
          sampling: of the requests; what counts is whether one samples, has bias, penalties or
            log-probabilities, or a structured output.
          tokens: most tokens of a request, prompt included; None: as many as fit.
          rows: numbers of rows that rounds are compiled for, rounded up to powers of two, and
            ``max_rows``; other numbers run in the next larger program. None: all.
          old_texts: whether old texts are verified as drafts (see ``add``), or repaired.
          on_progress: called with the number of programs that are compiled, and of all.

        Returns the seconds it took. Raises RuntimeError while requests are under way, and
        ValueError for bad sizes, and for more programs than ``max_programs``.
        """
        if not self.is_idle:
            raise RuntimeError("requests are under way: let them finish, or cancel them, first")
        verified = verified_kinds(self.params, sampling) if old_texts else []
        self._drain()
        self._start()
        started = time.perf_counter()
        cover = self.shapes.prepare(sampling, self.shape, tokens, rows, on_progress)
        verifying.prepare(self.programs, cover.sizes[-1], cover.tokens, verified)
        if self.limits.preemption == "auto":
            measure_preemption(self.programs, cover, self.preemption_costs)
        return time.perf_counter() - started

    def _drain(self) -> None:
        while self.has_work:
            self.step()

    def _fail(self, error: BaseException) -> None:
        """End all requests, and start anew: the interrupted call may have taken the state."""
        for generation in self._requests.interrupted(error):
            self._end(generation.request_id, "error")
        self._start()
        self.programs.reset()
        self._change_weights()

    def _read(self) -> None:
        """Wait for the calls that are in flight, if there are some, and hand out what they gave."""
        if self._in_flight is None:
            return
        launched, self._in_flight = self._in_flight, None
        plan, (calls, seconds) = launched.plan, self._runner.wait(launched.calls)
        launched = launched._replace(calls=calls)
        take_calls(calls, plan.sequences, self._requests.running)
        self.watch.add(calls)
        self.shapes.observe(launched, self._requests.running, seconds)
        deliveries = self.scheduler.update(plan, self._runner.results(launched))
        for request_id, reason in self._requests.deliver(deliveries):
            self._end(request_id, reason)
        if self.on_read is not None:
            self.on_read(plan, deliveries)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self.shapes.forget(request_id)
        self._runner.ended(self._requests.end(request_id, reason))

    def use_target(
        self, target: Decoder, *, version: int | None = None, in_flight: InFlight = "refuse"
    ) -> None:
        """Generate with other weights of the same shapes.

        Nothing is compiled again, and nothing passes through the host where the weights are on the
        devices. They are not copied there: a caller must not donate them while they serve, which is
        until ``version`` has changed again. What the prefix cache holds, and the texts that the
        drafter looks up, are forgotten.

        No text is of two versions: a request that has begun ends under the old weights, or goes
        back to its prompt. All others, those that come too, wait for the new weights, and get what
        fresh requests with their seeds get. The steps that follow see to it.

        Args:
          version: what ``Engine.version`` and the generations call the weights; None: the last one
            that was given, and 1. Weights that are given before these are used take their place.
          in_flight: what becomes of requests that have begun. ``refuse``: there may be none.
            ``finish``: they end first. ``restart``: they go back; but those that stream (see add)
            end first, and the others wait for them: what was shown stays as it is. ``repair``: the
            same with what they had as a draft, which is verified in wide passes (``add``); requests
            that cannot have one are restarted (docs/rl.md).

        Raises ValueError for other shapes, a version that is no integer, and an unknown
        ``in_flight``; RuntimeError for ``refuse`` while requests are under way.
        """
        params = self.weights.newest.params
        params = params.replace(target=replacement(params.target, target))
        self._change(params, self.weights.next_version(version), in_flight)

    def use_drafter(self, drafter: Drafter, *, in_flight: InFlight = "refuse") -> None:
        """Draft with other weights of the same shapes: see use_target. The version stays."""
        params, version = self.weights.newest
        params = params.replace(drafter=replacement(params.drafter, drafter))
        self._change(params, version, in_flight)

    def forget_texts(self) -> None:
        """Forget what use_target forgets; raises RuntimeError while requests are under way."""
        self._change(*self.weights.newest, in_flight="refuse")

    def _change(self, params: EngineParams, version: int, in_flight: InFlight) -> None:
        rule = rule_for(in_flight, params, is_idle=self.is_idle)
        self.programs.check_weights(params)
        with self._ending_all_by_errors():
            self._read()
            self.weights.ask(params, version, rule, self.scheduler)
            self._change_weights()

    def _change_weights(self) -> None:
        """Use the weights that were given, unless requests are left that end under the old ones."""
        if self.weights.pending is None or self.scheduler.begun:
            return
        while not self.scheduler.is_quiet:
            self._step()
        self.weights.apply(self.scheduler, self._runner)
