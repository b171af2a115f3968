"""From token prompts to generated tokens: host plans into arrays, compiled programs, results back.

The one module of the library that calls ``jax.jit``, so that donation and the number of traces can
be seen in one place. Shapes are rounded up to buckets: batch, length and prompt chunk to powers of
two, so that similar calls share one program.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import functional
from jaxspec.cache import pages_for
from jaxspec.config import CacheConfig
from jaxspec.functional import EngineParams
from jaxspec.sampling import make_sampling
from jaxspec.sharding import data_size
from jaxspec.state import EngineState

SMALLEST_LENGTH = 256
SMALLEST_CHUNK = 16
LARGEST_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request samples.

    Attributes:
      temperature: 0 always takes the likeliest token.
      top_k, top_p, min_p: keep the k likeliest tokens (0: all), the smallest set of mass top_p,
        those at least min_p times as likely as the likeliest; applied in this order.
      seed: equal seeds and prompts give equal texts, in any batch and with any drafter.
      max_tokens: most tokens to generate.
      stop_token_ids: tokens that end the text; None takes the model's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


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
        return Run(self, prompts, sampling, rounds_per_call or self.rounds_per_call)

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        if not prompts:
            raise ValueError("no prompts were given")
        if len(prompts) != len(sampling):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling)} sampling params")
        vocab = self.params.target.config.vocab_size
        limit = self.cache.max_length
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {index} is empty: give at least one token")
            if len(prompt) >= limit:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens and the cache holds {limit}, the "
                    "generated ones included: raise max_length"
                )
            if min(prompt) < 0 or max(prompt) >= vocab:
                raise ValueError(f"prompt {index} has a token id outside 0..{vocab - 1}")

    def new_state(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> EngineState:
        """An empty state whose batch and length are bucketed; surplus rows stay inactive."""
        shards = data_size(self.params.mesh)
        batch = shards * _power_of_two(-(-len(prompts) // shards))
        limits = [
            min(len(prompt) + params.max_tokens, self.cache.max_length)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        length = min(max(_power_of_two(max(limits)), SMALLEST_LENGTH), self.cache.max_length)
        self._check_pages(batch, length)
        stops = [self.stop_ids(params) for params in sampling]
        width = max(1, *(len(ids) for ids in stops))
        rows = [[*ids, *[-1] * (width - len(ids))] for ids in stops]
        state = functional.init_state(
            self.params,
            batch,
            length,
            page_size=self.cache.page_size,
            sampling=make_sampling(
                batch,
                temperature=_padded([p.temperature for p in sampling], batch),
                top_k=_padded([p.top_k for p in sampling], batch),
                top_p=_padded([p.top_p for p in sampling], batch),
                min_p=_padded([p.min_p for p in sampling], batch),
                seeds=_padded([p.seed for p in sampling], batch, np.uint32),
            ),
            max_lens=jnp.asarray(_padded(limits, batch, np.int32)),
            stop_token_ids=jnp.asarray(_padded(rows, batch, np.int32)),
        )
        # Committed to its device as the programs' results are: else each would compile twice.
        return state if self.params.mesh else jax.device_put(state, state.tokens.sharding)

    def _check_pages(self, batch: int, length: int) -> None:
        slots = self.params.speculation.scratch_slots
        pages = pages_for(length + slots, self.cache.page_size)
        budget = self.cache.num_pages
        if budget is not None and batch * pages > budget:
            raise ValueError(
                f"{batch} sequences of {length} tokens and a tree of {slots} slots need "
                f"{batch * pages} pages of {self.cache.page_size}, the budget is {budget}: shrink "
                "the tree, the length or the batch, or raise num_pages"
            )

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = self.params.target.config.stop_token_ids
        return own if params.stop_token_ids is None else params.stop_token_ids

    def chunks(
        self, prompts: Sequence[Sequence[int]], batch: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The prompts as prefill's (tokens [B, T], counts [B]), chunk by chunk."""
        lengths = np.zeros(batch, np.int32)
        lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
        width = min(max(_power_of_two(int(lengths.max())), SMALLEST_CHUNK), LARGEST_CHUNK)
        width = min(width, self.cache.max_length)
        for start in range(0, int(lengths.max()), width):
            tokens = np.zeros((batch, width), np.int32)
            for row, prompt in enumerate(prompts):
                piece = prompt[start : start + width]
                tokens[row, : len(piece)] = piece
            yield tokens, np.clip(lengths - start, 0, width).astype(np.int32)

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
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        rounds_per_call: int,
    ):
        self.timings = Timings()
        self._engine = engine
        self._prompts = prompts
        self._rounds_per_call = rounds_per_call
        self._seen = [len(prompt) for prompt in prompts]
        self._state = engine.new_state(prompts, sampling)

    def __iter__(self) -> Iterator[Progress]:
        engine, state = self._engine, self._state
        chunks = list(engine.chunks(self._prompts, state.tokens.shape[0]))
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
            for row in range(len(self._prompts))
        ]


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _padded(values: Sequence[object], batch: int, dtype: type = np.float32) -> np.ndarray:
    """The values as an array of ``batch`` rows, the last one repeated."""
    array = np.asarray(values, dtype)
    return np.concatenate([array, np.repeat(array[-1:], batch - len(array), axis=0)])
