"""Times the reading of long prompts, beside the operations that it takes."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.config.entries import EntryAttentionConfig, SpansConfig
from jaxspec.config.mixers import (
    AttentionConfig,
    BlockSparseConfig,
    IndexedAttentionConfig,
    LatentConfig,
)
from jaxspec.config.model import ModelConfig
from jaxspec.decoding import functional
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.prior_costs import round_work
from jaxspec.decoding.state import EngineState, Status
from jaxspec.engine.programs.xla_options import compiler_options
from jaxspec.evaluation.benchmarks.timing import timed


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one prompt of so many tokens is read: at most ``chunk`` of them in a call."""

    tokens: int
    chunk: int
    page_size: int
    repeats: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.chunk} at a time"

    def check_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for a prompt that leaves no position for the token after it."""
        if self.tokens >= config.max_position:
            raise ValueError(
                f"--prompts {self.tokens}: the model has {config.max_position} positions, one of "
                f"them for the first token: give at most {config.max_position - 1}"
            )

    @property
    def last_chunk(self) -> tuple[int, int]:
        """The tokens of the last whole chunk: from, to."""
        stop = self.tokens // self.chunk * self.chunk
        return stop - self.chunk, stop


@dataclasses.dataclass(frozen=True)
class PromptWork:
    """Additions and multiplications of reading some of a prompt's tokens, on all devices together.

    Attributes:
      products: of tokens and weights, without the LM head, which reads the last token alone.
      attention: scores and weighted sums of softmax attention: over what an indexer chooses, and
        over entries of spans. What recurrent layers and indexers compute beside their products is
        not counted, nor how entries are made.
    """

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


@dataclasses.dataclass(frozen=True)
class ReadingTiming:
    """The times of a prompt.

    Attributes:
      first_token_ms: until the token after the prompt is known: the median of ``all_ms``, without
        what a server adds.
      first_chunk_ms, last_chunk_ms: of the calls that read the first and the last whole chunk.
      attention_rate: operations a second and device of what attention computes more in the last
        chunk than in the first; None: there is one chunk.
    """

    tokens: int
    chunk: int
    first_token_ms: float
    all_ms: tuple[float, ...]
    first_chunk_ms: float
    last_chunk_ms: float
    work: PromptWork
    attention_rate: float | None
    compile_seconds: float


class PromptBench:
    """The compiled programs that read one prompt. They are compiled for its length: page tables
    are as wide as it needs."""

    def __init__(self, params: EngineParams, reading: Reading):
        config, rng = params.target.config, np.random.default_rng(0)
        self.params, self.reading = params, reading
        self._prompt = rng.integers(config.vocab_size, size=(1, reading.tokens), dtype=np.int32)
        options = functools.partial(compiler_options, params.target.embed, deterministic=False)
        jit = functools.partial(jax.jit, donate_argnums=1)
        self._admit = jit(functional.admit, compiler_options=options())
        started = time.perf_counter()
        prefill = jit(
            functional.prefill,
            static_argnames=("width", "greedy"),
            compiler_options=options(reads=True),
        )
        how: dict[str, Any] = {"width": reading.chunk, "greedy": True}
        self._prefill = prefill.lower(params, self.new_state(), **how).compile()
        self.compile_seconds = time.perf_counter() - started

    def new_state(self) -> EngineState:
        """A state with the prompt admitted, and a place for the token after it."""
        params, reading = self.params, self.reading
        state = functional.init_state(params, 1, reading.tokens + 1, page_size=reading.page_size)
        if params.mesh is None:
            state = jax.device_put(state, params.target.embed.sharding)
        row, length = np.zeros(1, np.int32), np.full(1, reading.tokens, np.int32)
        return jax.block_until_ready(self._admit(params, state, row, self._prompt, length))

    def read_chunk(self, state: EngineState) -> EngineState:
        """Read the next tokens."""
        state, _ = self._prefill(self.params, state)
        return state

    def read(self, state: EngineState) -> EngineState:
        """Read the whole prompt."""
        for _ in range(0, self.reading.tokens, self.reading.chunk):
            state = self.read_chunk(state)
        return state


def time_reading(bench: PromptBench, report: Callable[[str], None]) -> ReadingTiming:
    """Read the prompt ``repeats`` times; the first time each call is waited for.

    Raises RuntimeError if there is no token after it, which would make the figures wrong.
    """
    reading, params = bench.reading, bench.params
    report("warming up")
    jax.block_until_ready(bench.read_chunk(bench.new_state()))
    state, chunks = bench.new_state(), []
    for _ in range(0, reading.tokens, reading.chunk):
        state, seconds = timed(bench.read_chunk, state)
        chunks.append(seconds)
    if np.asarray(state.rows.status)[0] == Status.READING:
        raise RuntimeError("the prompt was not read to its end")
    del state  # before the next one is made
    all_seconds: list[float] = [sum(chunks)]
    for _ in range(1, reading.repeats):
        all_seconds.append(timed(bench.read, bench.new_state())[1])
        report(f"call {len(all_seconds)}/{reading.repeats}: {1e3 * all_seconds[-1]:.1f} ms")
    start, stop = reading.last_chunk
    first, last = chunks[0], chunks[start // reading.chunk]
    return ReadingTiming(
        tokens=reading.tokens,
        chunk=reading.chunk,
        first_token_ms=1e3 * statistics.median(all_seconds),
        all_ms=tuple(1e3 * seconds for seconds in all_seconds),
        first_chunk_ms=1e3 * first,
        last_chunk_ms=1e3 * last,
        work=prompt_work(params, 0, reading.tokens),
        attention_rate=_attention_rate(params, reading, last - first),
        compile_seconds=bench.compile_seconds,
    )


def _attention_rate(params: EngineParams, reading: Reading, longer: float) -> float | None:
    start, stop = reading.last_chunk
    if start == 0 or longer <= 0:
        return None
    works = prompt_work(params, start, stop), prompt_work(params, 0, reading.chunk)
    return (works[0].attention - works[1].attention) / longer / num_devices(params)


def num_devices(params: EngineParams) -> int:
    """Devices that read a prompt together."""
    return 1 if params.mesh is None else params.mesh.size


def prompt_work(params: EngineParams, start: int, stop: int) -> PromptWork:
    """The operations of reading tokens ``start`` to ``stop`` of a prompt."""
    config, shards = params.target.config, num_devices(params) // params.sequence_parallel
    logits = 2 * config.hidden_size * config.vocab_size
    of_token = round_work(params.target, NoDrafter()).operations * shards - logits
    return PromptWork(
        products=float(of_token * (stop - start)),
        attention=_attention_operations(config, start, stop),
    )


def _attention_operations(config: ModelConfig, start: int, stop: int) -> float:
    operations = 0.0
    for mixer in (mixer for layer in config.layers for mixer in layer.mixers):
        if isinstance(mixer, LatentConfig):
            width = mixer.num_heads * (mixer.query_dim + mixer.value_dim)
            most = None if mixer.indexer is None else mixer.indexer.most
            operations += 2 * width * _seen(start, stop, most)
        elif isinstance(mixer, EntryAttentionConfig):
            width = 4 * mixer.num_heads * mixer.head_dim
            operations += width * _seen(start, stop, mixer.window)
            operations += width * _entries_seen(start, stop, mixer.spans)
        elif isinstance(mixer, IndexedAttentionConfig):
            width = 4 * mixer.num_heads * mixer.attention.head_dim
            operations += width * _seen(start, stop, mixer.indexer.most)
        elif isinstance(mixer, BlockSparseConfig):
            width = 4 * mixer.num_heads * mixer.attention.head_dim
            operations += width * _seen(start, stop, mixer.index.most)
        elif isinstance(mixer, AttentionConfig):
            most = min(filter(None, (mixer.window, mixer.chunk)), default=None)
            operations += 4 * mixer.num_heads * mixer.head_dim * _seen(start, stop, most)
    return operations


def _entries_seen(start: int, stop: int, spans: SpansConfig | None) -> float:
    """Added up: how many entries of spans each of tokens ``start`` to ``stop`` attends to."""
    if spans is None:
        return 0.0
    entries = np.arange(start + 1, stop + 1, dtype=np.float64) // spans.size
    most = np.inf if spans.indexer is None else spans.indexer.top_k
    return float(np.sum(np.minimum(entries, most)))


def _seen(start: int, stop: int, most: int | None) -> float:
    """Added up: how many tokens each of tokens ``start`` to ``stop`` sees, itself included."""
    seen = np.arange(start + 1, stop + 1, dtype=np.float64)
    return float(np.sum(seen if most is None else np.minimum(seen, most)))
