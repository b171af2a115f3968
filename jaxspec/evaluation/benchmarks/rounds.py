"""Times prefill and rounds of the engine on random prompts."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.stages import Compiled

from jaxspec.config.model import ModelConfig
from jaxspec.config.recurrent import RecurrentConfig
from jaxspec.decoding import functional
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import EngineState
from jaxspec.engine.programs.xla_options import compiler_options
from jaxspec.evaluation.benchmarks.chosen_experts import (
    ChosenExperts,
    can_count,
    chosen_experts,
    count_rounds,
    expected_of_a_layer,
)
from jaxspec.evaluation.benchmarks.floors import FloorBytes, floor_bytes, verified
from jaxspec.evaluation.benchmarks.modes import Mode
from jaxspec.evaluation.benchmarks.random_cache import with_random_pages
from jaxspec.evaluation.benchmarks.timing import timed

LARGEST_CHUNK = 512
SCORE_BYTES = 2 << 30  # limit for the float32 attention scores of a prefill chunk, if materialized

# How rows sample. Greedy rows use the program without sampling, all others the general one.
SAMPLING: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top_p": {"temperature": 0.8, "top_p": 0.9},
        "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    }
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """How much is decoded.

    Attributes:
      batch: number of sequences.
      context: prompt tokens of each sequence.
      rounds: rounds of a timed call; the state has slots for their tokens after the prompt.
      repeats: number of timed calls; each starts from the prompt, with other seeds.
      sampling: how rows sample: a key of SAMPLING.
      chunk: most prompt tokens of a sequence in a call; None: LARGEST_CHUNK, or fewer.
      random_cache: of a prompt only the last chunk is read; random numbers stand for what reading
        the tokens before would leave in the cache.
    """

    batch: int
    context: int
    rounds: int
    page_size: int
    repeats: int
    sampling: str = "greedy"
    chunk: int | None = None
    random_cache: bool = False

    def max_length(self, mode: Mode) -> int:
        """Room for the prompt and one call, and one more token, so that no sequence ends."""
        return self.context + self.rounds * mode.most_tokens + 2

    def check_fits(self, mode: Mode, config: ModelConfig) -> None:
        """Raises ValueError for a context that leaves too few of the model's positions."""
        needed, there = self.max_length(mode), config.max_position
        if needed > there:
            raise ValueError(
                f"--context {self.context} needs {needed} positions with what is generated, and "
                f"the model has {there}: give at most {there - (needed - self.context)}"
            )


@dataclasses.dataclass(frozen=True)
class Timing:
    """The results of a mode's timed calls.

    Attributes:
      first_context, last_context: means over the sequences, before the first round of a timed call
        and after the last.
      floor: with the ``chosen`` experts where they are counted.
      prefill_tokens: of each prompt, which ``prefill_ms`` took: all, or those that were not cached.
      chosen: distinct experts that tokens chose in the rounds of the first timed call; None: there
        are no experts, or several devices.
      expected: the same of a layer, if tokens chose all experts alike often and independently.
    """

    mode: str
    batch: int
    first_context: float
    last_context: float
    prefill_ms: float
    prefill_tokens: int
    prefill_chunk: int
    rounds: int
    round_ms: float
    all_round_ms: tuple[float, ...]
    acceptance_length: float
    tokens_per_second: float
    floor: FloorBytes
    compile_seconds: float
    chosen: ChosenExperts | None
    expected: float | None


@dataclasses.dataclass(frozen=True)
class _Call:
    """One timed call of ``decode``; contexts are means over the sequences."""

    seconds: float
    before: float
    after: float


def time_mode(bench: "Bench", report: Callable[[str], None]) -> Timing:
    """Time a mode. ``report`` gets lines about the progress.

    Raises RuntimeError if a sequence ended early, which would make the figures wrong.
    """
    params, workload = bench.params, bench.workload
    report("warming up")
    jax.block_until_ready(bench.decode(bench.fill(bench.new_state()), workload.rounds))
    calls, fills = [], []
    for call, fill_seconds in bench.calls():
        calls.append(call)
        fills.append(fill_seconds)
        report(f"call {len(calls)}/{workload.repeats}: {1e3 * call.seconds:.1f} ms")
    chosen = bench.count_experts(report)
    round_ms = [1e3 * call.seconds / workload.rounds for call in calls]
    committed = sum(call.after - call.before for call in calls)
    acceptance = committed / (workload.rounds * len(calls))
    middle = statistics.mean((call.before + call.after) / 2 for call in calls)
    median = statistics.median(round_ms)
    return Timing(
        mode=bench.mode.name,
        batch=workload.batch,
        first_context=min(call.before for call in calls),
        last_context=max(call.after for call in calls),
        prefill_ms=1e3 * statistics.median(fills),
        prefill_tokens=workload.context - bench.cached,
        prefill_chunk=bench.chunk,
        rounds=workload.rounds,
        round_ms=median,
        all_round_ms=tuple(round_ms),
        acceptance_length=acceptance,
        tokens_per_second=1e3 * workload.batch * acceptance / median,
        floor=floor_bytes(params, workload.batch, middle, acceptance, chosen),
        compile_seconds=bench.compile_seconds,
        chosen=chosen,
        expected=expected_of_a_layer(params.target, workload.batch * verified(params)),
    )


class Bench:
    """The programs of one mode, each compiled when it is first needed, and its prompts. Holds no
    state: states are large.

    Args:
      one_state: a lock for Benches that are made side by side, so that only one of them has a state
        at a time: 32 rows of 8k tokens of a 70B model are 22 GB on each of 4 devices.
    """

    def __init__(
        self,
        mode: Mode,
        params: EngineParams,
        workload: Workload,
        one_state: AbstractContextManager[Any] | None = None,
    ):
        config, rng = params.target.config, np.random.default_rng(0)
        self.mode, self.params, self.workload = mode, params, workload
        self.max_length = workload.max_length(mode)
        self.chunk = prefill_chunk(params, workload, self.max_length)
        self.cached = workload.context - self.chunk if workload.random_cache else 0
        shape = (workload.batch, workload.context)
        self.prompts = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
        started = time.perf_counter()
        self._admit = self._jit(functional.admit)
        with one_state or nullcontext():
            self._state_shape = jax.tree.map(_shape_of, self.new_state())
        self.compile_seconds = time.perf_counter() - started

    def compile_all(self) -> "Bench":
        """This one, with the programs of ``time_mode`` compiled: while XLA compiles nothing may be
        timed."""
        _ = self._prefill, self._decode, self._count
        return self

    @functools.cached_property
    def _prefill(self) -> Compiled:
        prefill = self._jit(functional.prefill, reads=True, static_argnames=("width", "greedy"))
        return self._compiled(prefill, width=self.chunk, greedy=self._greedy)

    @functools.cached_property
    def _decode(self) -> Compiled:
        names = "max_rounds", "greedy", "checked"
        decode, most = self._jit(functional.decode, static_argnames=names), self.workload.rounds
        how: dict[str, Any] = {"max_rounds": most, "greedy": self._greedy}
        return self._compiled(decode, np.int32(0), **how, checked=False)  # as engines compile it

    @functools.cached_property
    def _count(self) -> Compiled | None:
        if not can_count(self.params):
            return None
        count = self._jit(count_rounds, static_argnames=("rounds", "greedy"))
        how: dict[str, Any] = {"rounds": self.workload.rounds, "greedy": self._greedy}
        return count.lower(self.params, self._state_shape, **how).compile()

    @property
    def _greedy(self) -> bool:
        return self.workload.sampling == "greedy"

    def _jit(self, function: Any, *, reads: bool = False, **how: Any) -> Any:
        """``reads``: it reads prompts."""
        table = self.params.target.embed
        options = compiler_options(table, deterministic=False, reads=reads)
        return jax.jit(function, donate_argnums=1, compiler_options=options, **how)

    def _compiled(self, function: Any, *arguments: Any, **static: Any) -> Compiled:
        started = time.perf_counter()
        program = function.lower(self.params, self._state_shape, *arguments, **static).compile()
        self.compile_seconds += time.perf_counter() - started
        return program

    def program_text(self) -> str:
        """The text of the compiled decode program."""
        return self._decode.as_text() or ""

    def prompt_program_text(self) -> str:
        """The text of the compiled program that reads prompts."""
        return self._prefill.as_text() or ""

    def new_state(self, repeat: int = 0) -> EngineState:
        """A state with the prompts admitted, with the shardings of the programs' results.

        Each ``repeat`` has other seeds, so other tokens and other acceptance lengths.
        """
        workload, params = self.workload, self.params
        state = functional.init_state(
            params, workload.batch, self.max_length, page_size=workload.page_size
        )
        if params.mesh is None:
            state = jax.device_put(state, params.target.embed.sharding)
        rows = np.arange(workload.batch, dtype=np.int32)
        sampling = make_sampling(
            workload.batch, seeds=rows + repeat * workload.batch, **SAMPLING[workload.sampling]
        )
        # The last of the cached tokens are read once more.
        again = params.drafter.num_reread_tokens if self.cached else 0
        lengths, cached = (
            np.full(workload.batch, count, np.int32)
            for count in (workload.context, self.cached + again)
        )
        arrived = rows, self.prompts, lengths
        state = self._admit(params, state, *arrived, sampling=sampling, cached_lens=cached)
        if workload.random_cache:
            state = state.replace(pool=with_random_pages(state.pool))
        return jax.block_until_ready(state)

    def fill(self, state: EngineState) -> EngineState:
        """Read the prompts, but for what is cached, in chunks."""
        for _ in range(self.cached, self.workload.context, self.chunk):
            state, _ = self._prefill(self.params, state)
        return state

    def decode(self, state: EngineState, rounds: int) -> EngineState:
        """Run rounds, at most the workload's."""
        state, _ = self._decode(self.params, state, np.int32(rounds))
        return state

    def calls(self) -> Iterator[tuple[_Call, float]]:
        """Timed calls of ``decode``, each with the seconds of the prefill before it."""
        for repeat in range(self.workload.repeats):
            state, fill_seconds = timed(self.fill, self.new_state(repeat))
            before = _mean_context(state)
            state, seconds = timed(self.decode, state, self.workload.rounds)
            if not np.all(state.rows.active):
                raise RuntimeError("a sequence ended before the timed call did")
            yield _Call(seconds, before, _mean_context(state)), fill_seconds
            del state  # before the next one is made

    def count_experts(self, report: Callable[[str], None]) -> ChosenExperts | None:
        """Run the rounds of the first timed call again, and count the experts that they read; None
        where they are not counted (see ``can_count``), or the device has no memory for it."""
        if self._count is None:
            return None
        try:
            _, *counts = self._count(self.params, self.fill(self.new_state()))
            return chosen_experts(*jax.block_until_ready(counts))
        except jax.errors.JaxRuntimeError as error:  # what was timed is kept
            report(f"experts were not counted: {str(error).splitlines()[0]}")
            return None


def prefill_chunk(params: EngineParams, workload: Workload, max_length: int) -> int:
    """Prompt tokens per call, unless the workload says: few enough that attention scores fit in
    memory, where they are materialized. Devices that share sequences share the tokens."""
    if workload.chunk is not None:
        return min(workload.chunk, workload.context)
    most = min(LARGEST_CHUNK * params.sequence_parallel, workload.context)
    if "paged_attention" in params.kernels or params.sequence_parallel > 1:  # it works in blocks
        return most
    slots = max_length + params.speculation.scratch_slots
    mixers = [mixer for layer in params.target.config.layers for mixer in layer.mixers]
    heads = max([m.num_heads for m in mixers if not isinstance(m, RecurrentConfig)] or [1])
    fitting = SCORE_BYTES // (4 * workload.batch * heads * slots)
    return min(most, 1 << max(4, fitting.bit_length() - 1))


def _shape_of(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _mean_context(state: EngineState) -> float:
    return float(np.mean(state.rows.context_lens))
