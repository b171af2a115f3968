"""From token prompts to generated tokens: host plans into arrays, compiled programs, results back.

The one module of the serving path that calls ``jax.jit``, so that donation and the number of
traces can be seen in one place.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import functional
from jaxspec.config import CacheConfig
from jaxspec.functional import EngineParams
from jaxspec.sampling import make_sampling
from jaxspec.scheduling.batching import BatchPlan, plan_batch
from jaxspec.scheduling.requests import SamplingParams, check_requests
from jaxspec.sharding import data_size
from jaxspec.state import EngineState


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one call of a program added: new tokens of each request, and who is done."""

    new_tokens: list[list[int]]
    done: list[bool]


@dataclasses.dataclass(frozen=True)
class RequestStatistics:
    """Rounds of one request; ``accepted[d]`` counts those that accepted at least d tokens."""

    rounds: int
    drafted: int
    accepted: tuple[int, ...]


@dataclasses.dataclass
class Timings:
    """Seconds of the compiled programs alone; ``compile`` is what preparing them took."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Engine:
    """Runs batches of token prompts; keeps the compiled programs.

    Args:
      params: as made by load.
      cache: geometry of the paged cache; ``max_length`` bounds every request.
      rounds_per_call: rounds between two looks at the results.
    """

    def __init__(
        self, params: EngineParams, cache: CacheConfig | None = None, rounds_per_call: int = 32
    ):
        self.params = params
        self.cache = CacheConfig() if cache is None else cache
        self.rounds_per_call = rounds_per_call
        self.prefill = jax.jit(functional.prefill, donate_argnums=1)
        self.decode = jax.jit(functional.decode, donate_argnums=1)
        self._ready: set[tuple[object, ...]] = set()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        rounds_per_call: int | None = None,
    ) -> "Run":
        """Start a batch. Raises ValueError for a prompt that is empty or too long for the cache."""
        self.check(prompts, sampling)
        plan = plan_batch(
            prompts,
            sampling,
            self.cache,
            model_stops=self.params.target.config.stop_token_ids,
            scratch_slots=self.params.speculation.scratch_slots,
            data_parallel=data_size(self.params.mesh),
        )
        return Run(self, plan, rounds_per_call or self.rounds_per_call)

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        """Raise ValueError for requests that could not run."""
        vocab_size = self.params.target.config.vocab_size
        check_requests(prompts, sampling, vocab_size, self.cache.max_length)

    def new_state(self, plan: BatchPlan) -> EngineState:
        """An empty state for a batch."""
        state = functional.init_state(
            self.params,
            plan.batch,
            plan.length,
            page_size=self.cache.page_size,
            sampling=make_sampling(
                plan.batch,
                temperature=plan.values("temperature"),
                top_k=plan.values("top_k", np.int32),
                top_p=plan.values("top_p"),
                min_p=plan.values("min_p"),
                seeds=plan.values("seed", np.uint32),
            ),
            max_lens=jnp.asarray(plan.max_lens),
            stop_token_ids=jnp.asarray(plan.stop_token_ids),
        )
        # Committed to its device as the programs' results are: else each would compile twice.
        return state if self.params.mesh else jax.device_put(state, state.tokens.sharding)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = self.params.target.config.stop_token_ids
        return own if params.stop_token_ids is None else params.stop_token_ids

    def warm_up(self, state: EngineState, tokens: np.ndarray) -> EngineState:
        """Compile both programs for these shapes by running them on nothing."""
        key = (jax.tree.structure(state), tokens.shape, state.tokens.shape, state.stop_tokens.shape)
        if key in self._ready:
            return state
        nothing = np.zeros(tokens.shape[0], np.int32)
        state = self.decode(self.params, self.prefill(self.params, state, tokens, nothing), 0)
        self._ready.add(key)
        return jax.block_until_ready(state)


class Run:
    """One batch under way. Iterate it for Progress; then read ``timings`` and ``statistics``."""

    def __init__(
        self,
        engine: Engine,
        plan: BatchPlan,
        rounds_per_call: int,
    ):
        self.timings = Timings()
        self._engine = engine
        self._plan = plan
        self._rounds_per_call = rounds_per_call
        self._seen = [len(prompt) for prompt in plan.prompts]
        self._state = engine.new_state(plan)

    def __iter__(self) -> Iterator[Progress]:
        engine, state = self._engine, self._state
        chunks = list(self._plan.prompt_chunks())
        started = time.perf_counter()
        state = engine.warm_up(state, chunks[0][0])
        self.timings.compile = time.perf_counter() - started
        started = time.perf_counter()
        for tokens, counts in chunks:
            state = engine.prefill(engine.params, state, tokens, counts)
        progress = self._progress(state)
        self.timings.prefill = time.perf_counter() - started
        yield progress
        rounds = 1  # the first call is short, so that the first words show soon
        while not all(progress.done):
            started = time.perf_counter()
            state = engine.decode(engine.params, state, rounds)
            progress = self._progress(state)
            self.timings.decode += time.perf_counter() - started
            rounds = min(2 * rounds, self._rounds_per_call)
            yield progress
        self._state = state

    def _progress(self, state: EngineState) -> Progress:
        tokens, context_lens, active = jax.device_get(
            (state.tokens, state.context_lens, state.active)
        )
        new_tokens = []
        for row, seen in enumerate(self._seen):
            end = int(context_lens[row]) + 1
            new_tokens.append(tokens[row, seen:end].tolist())
            self._seen[row] = end
        return Progress(new_tokens, [not active[row] for row in range(len(self._seen))])

    @property
    def statistics(self) -> list[RequestStatistics]:
        """Of each request, once the run has ended."""
        stats = jax.device_get(self._state.stats)
        return [
            RequestStatistics(
                rounds=int(stats.rounds[row]),
                drafted=int(stats.drafted[row]),
                accepted=tuple(int(count) for count in stats.accepted[row]),
            )
            for row in range(len(self._plan.prompts))
        ]
