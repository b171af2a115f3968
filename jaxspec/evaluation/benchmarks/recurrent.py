"""Benchmarks of the gated delta rule as it runs without kernels: jaxspec/cache/recurrent.py on the
arguments of pallas_kernels/delta_rule/cases.py."""

import dataclasses
from collections.abc import Sequence

from jax import Array, lax

from jaxspec.cache import CommittedPath
from jaxspec.cache.delta_rule import DeltaInputs
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from pallas_kernels.benchmark import Benchmark
from pallas_kernels.delta_rule.cases import (
    BENCHMARK_ROUNDS,
    BENCHMARK_RUNS,
    KEPT,
    round_benchmark,
    run_benchmark,
)
from pallas_kernels.selection import NO_KERNELS

BLOCK_SECONDS = 1e-4  # of a block of the window's size, at least


def benchmarks() -> Sequence[Benchmark]:
    """Rounds and prompts."""
    return [
        *(in_jnp(round_benchmark(size)) for size in BENCHMARK_ROUNDS),
        *(in_jnp(run_benchmark(size)) for size in BENCHMARK_RUNS),
    ]


def in_jnp(benchmark: Benchmark) -> Benchmark:
    """A ``round_benchmark`` or ``run_benchmark`` of the operations that the kernels replace.

    It is its own reference, timed twice: entries of windows past a row's tokens hold other noise
    than the kernels leave there.
    """
    call = _round if benchmark.name.startswith("round") else _run
    return dataclasses.replace(
        benchmark,
        call=call,
        reference=call,
        implementation="reference",
        seconds=BLOCK_SECONDS,
        reference_seconds=BLOCK_SECONDS,
    )


def _round(*arguments: Array) -> tuple[Array, ...]:
    state, rows, lens = _state(arguments)
    q, *inputs, new, ancestors, depth, path, counts = arguments[KEPT:]
    nodes = DeltaNodes(inputs=_inputs(inputs), channels=new)
    context_lens = lens[rows]
    out, state = state.read_tree(rows, context_lens, q, nodes, ancestors, depth)
    out, path = lax.optimization_barrier((out, path))  # what is accepted depends on what was read
    committed = CommittedPath(
        rows=rows,
        page_table=rows[:, None],
        context_lens=context_lens,
        path=path,
        counts=counts,
        is_chain=False,
    )
    [state] = DeltaState.commit([state], committed, NO_KERNELS)
    return out, *_kept(state, rows, lens.at[rows].add(counts))


def _run(*arguments: Array) -> tuple[Array, ...]:
    state, rows, lens = _state(arguments)
    q, *inputs = arguments[KEPT:]
    channels = state.channels[rows][:, :1].repeat(q.shape[1], axis=1)
    new = DeltaNodes(inputs=_inputs(inputs), channels=channels)
    counts = 0 * rows + q.shape[1]
    out, after = state.read_run(rows, lens[rows], counts, q, new)
    # As the kernel leaves it: windows stay.
    return out, *_kept(state.replace(s=after.s), rows, lens)


def _state(arguments: Sequence[Array]) -> tuple[DeltaState, Array, Array]:
    s, *window, channels, rows, lens = arguments[:KEPT]
    state = DeltaState(s=s, window=_inputs(window), channels=channels, folded=window[0].shape[1])
    return state, rows, lens


def _inputs(parts: Sequence[Array]) -> DeltaInputs:
    k, v, g, beta = parts
    return DeltaInputs(k=k, v=v, g=g, beta=beta)


def _kept(state: DeltaState, rows: Array, lens: Array) -> tuple[Array, ...]:
    """What the next call takes."""
    following = (rows + len(rows)) % len(state.s)
    return state.s, *state.window.tokens, state.channels, following, lens
