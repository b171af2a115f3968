"""The requests of an engine: what they begin with, and those that have not ended."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.generation import (
    FinishReason,
    Generation,
    Grammar,
    RequestStatistics,
    Running,
    new_grammar,
)
from jaxspec.engine.host_drafter import drafts_on_host
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Kind, Load
from jaxspec.engine.structured import Matcher
from jaxspec.scheduling.plan import Delivery
from jaxspec.scheduling.sequence import Request

type MakeMatcher = Callable[[StructuredOutput], Matcher]


class Requests:
    """Gives requests what they begin with, and keeps them until they end.

    Args:
      make_matcher: see Engine.

    Attributes:
      running: those that have not ended, by their ids.
      load: what the programs of these, and of those before them, must hold.
    """

    def __init__(self, programs: Programs, make_matcher: MakeMatcher | None):
        self.running: dict[str, Running] = {}
        self.load = Load()
        self._programs, self._make_matcher = programs, make_matcher
        self._ids = map(str, itertools.count())
        self._seeds = np.random.default_rng()

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        return sampling.stops(self._programs.params.target.config.stop_token_ids)

    def new(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        streams: bool,
        draft: Sequence[int] = (),
    ) -> Generation:
        """A request that runs once it is added; without a seed it gets one."""
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=self._next_seed())
        tokens = tuple(map(int, prompt))
        generation = Generation(next(self._ids), tokens, sampling, self._statistics())
        generation.grammar, generation.streams = self._grammar(sampling), streams
        generation.draft = tuple(map(int, draft))
        generation.host_drafts = drafts_on_host(self._programs.params, sampling)
        return generation

    def new_samples(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        streams: bool,
        drafts: Sequence[Sequence[int]] | None,
    ) -> Iterator[tuple[Generation, str | None]]:
        """The same for every sample of each prompt, with the group of those that share one.

        Trainers give a prompt as often as it has samples.
        """
        texts = itertools.repeat(()) if drafts is None else iter(drafts)
        known = [tuple(map(int, prompt)) for prompt in prompts]
        several = {prompt for prompt, count in collections.Counter(known).items() if count > 1}
        groups = {prompt: next(self._ids) for prompt in several}
        for prompt, params in zip(known, sampling, strict=True):
            group = groups.get(prompt) or (next(self._ids) if params.num_samples > 1 else None)
            for sample in params.samples(self._next_seed()):
                yield self.new(prompt, sample, streams, next(texts)), group

    def add(self, generation: Generation, request: Request) -> None:
        """A request, which is ``request`` to the scheduler, has not ended from now on."""
        tokens, kind = len(request.prompt) + request.max_tokens, Kind.of(generation.sampling)
        self.load = self.load if self.running else Load()
        self.load.add(len(self.running) + 1, tokens, kind)
        started = self._clock(), self._programs.compile_seconds
        self.running[generation.request_id] = Running(generation, *started)

    def begin_again(self, request_id: str) -> None:
        """Let a request go back to its prompt."""
        running = self.running[request_id]
        generation, running.first_token = running.generation, None
        generation.begin_again(self._statistics(), self._grammar(generation.sampling))

    def deliver(self, deliveries: Iterable[Delivery]) -> Iterator[tuple[str, FinishReason]]:
        """Add new tokens to requests that have not ended: those that end now, and why."""
        for delivery in deliveries:
            running = self.running.get(delivery.request_id)
            if running is None:
                continue
            generation = running.generation
            if delivery.tokens and not generation.token_ids:
                running.first_token = self._clock()
            generation.token_ids.extend(delivery.tokens)
            if delivery.ended is not None:
                yield delivery.request_id, generation.row_ended(delivery.ended)

    def interrupted(self, error: BaseException) -> list[Generation]:
        """All of them; they say that a call of theirs was interrupted."""
        generations = [running.generation for running in self.running.values()]
        for generation in generations:
            generation.fail_interrupted(error)
        return generations

    def end(self, request_id: str, reason: FinishReason) -> Generation:
        """The request, which has ended."""
        running = self.running.pop(request_id)
        running.generation.finish_reason = reason
        times = self._clock(), self._programs.compile_seconds
        running.generation.timings = running.timings(*times)
        return running.generation

    def _next_seed(self) -> int:
        return int(self._seeds.integers(2**32))

    def _clock(self) -> float:
        """Seconds; it stands still while programs compile."""
        return time.perf_counter() - self._programs.compile_seconds

    def _statistics(self) -> RequestStatistics:
        return RequestStatistics(0, 0, [0] * (self._programs.params.speculation.max_depth + 1))

    def _grammar(self, sampling: SamplingParams) -> Grammar | None:
        most = self._programs.sizes.max_stops
        return new_grammar(sampling, self._make_matcher, self.stop_ids(sampling), most)
