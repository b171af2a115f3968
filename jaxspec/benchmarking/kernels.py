"""Timing single operations: chains of calls inside one program, over more data than caches hold."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.benchmarking.timing import timed
from pallas_kernels.benchmark import Arguments, Benchmark

SHORTEST_CHAIN = 16  # calls in the body of the timed loop, whose own turn costs about 10 us
CALL_SECONDS = 1e-5  # a call is not expected to take less
MOST_SETS = 64  # of arguments; small ones stay in the cache then, as they do between layers


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and over what a call is timed.

    Attributes:
      rotation_bytes: arguments to go through before any are used again; several times the cache.
      seconds: of one timed program, at least about.
      repeats: timed programs; their median counts.
    """

    rotation_bytes: int
    seconds: float
    repeats: int


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What the device was measured to do at best."""

    bandwidth: float  # bytes/s
    product_rate: float  # FLOP/s

    def floor(self, benchmark: Benchmark) -> tuple[float, str]:
        """Seconds that a call takes at least, and what bounds it: memory or compute."""
        memory = benchmark.num_bytes / self.bandwidth
        compute = benchmark.flops / self.product_rate
        return max((memory, "memory"), (compute, "compute"))


@dataclasses.dataclass(frozen=True)
class KernelTiming:
    """One case: our function beside its jnp reference, each compared with that in float32."""

    case: str
    implementation: str
    seconds: float
    reference_seconds: float
    error: float
    reference_error: float
    num_bytes: int
    flops: int
    floor_seconds: float
    bound: str


def time_benchmark(benchmark: Benchmark, peaks: Peaks, plan: Plan) -> KernelTiming:
    """Time a case and compare its results."""
    first = benchmark.make_arguments(0)
    copies = min(max(1, -(-plan.rotation_bytes // _num_bytes(first))), MOST_SETS)
    sets = [first, *(benchmark.make_arguments(seed) for seed in range(1, copies))]
    floor, bound = peaks.floor(benchmark)
    num_calls = round(plan.seconds / max(floor, CALL_SECONDS))

    def seconds(call: Callable[..., Any]) -> float:
        return seconds_a_call(call, benchmark.feed, sets, num_calls, plan.repeats)

    exact = exact_result(benchmark, first)
    return KernelTiming(
        case=benchmark.name,
        implementation=benchmark.implementation,
        seconds=seconds(benchmark.call),
        reference_seconds=seconds(benchmark.reference),
        error=relative_error(jax.jit(benchmark.call)(*first), exact),
        reference_error=relative_error(jax.jit(benchmark.reference)(*first), exact),
        num_bytes=benchmark.num_bytes,
        flops=benchmark.flops,
        floor_seconds=floor,
        bound=bound,
    )


def seconds_a_call(
    call: Callable[..., Any],
    feed: Callable[[Arguments, Any], Arguments],
    sets: Sequence[Arguments],
    num_calls: int,
    repeats: int,
) -> float:
    """Median seconds of a call in a loop over chains of calls that rotate through ``sets``.

    The first set's tables, lengths and masks serve all, and what is made of them alone is made once
    a chain, as the layers of a model share it. Each call waits for the one before it and for its
    arrays of numbers: no work on those is shared between calls or moved out of the loop.
    """
    length = max(len(sets), SHORTEST_CHAIN)
    passes = max(1, num_calls // length)
    traced_once = jax.jit(call)
    tables = [None if _is_data(x) else x for x in sets[0]]
    data = [[x for x in arguments if _is_data(x)] for arguments in sets]

    @jax.jit
    def program(tables: Sequence[Array | None], data: Sequence[Sequence[Array]]) -> Any:
        def arguments(index: int) -> Arguments:
            own = iter(data[index % len(data)])
            return tuple(
                next(own) if _is_data(x) else table
                for x, table in zip(sets[0], tables, strict=True)
            )

        def chain(_: Array, output: Any) -> Any:
            for index in range(length):
                output = traced_once(*_pinned(feed(arguments(index), output)))
            return output

        return lax.fori_loop(0, passes, chain, traced_once(*arguments(0)))

    jax.block_until_ready(program(tables, data))
    seconds = [timed(program, tables, data)[1] for _ in range(repeats)]
    return statistics.median(seconds) / (1 + passes * length)


def _is_data(x: Array | None) -> TypeGuard[Array]:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def _pinned(arguments: Arguments) -> Arguments:
    """The same, floating-point arrays held in place behind a barrier."""
    pinned = iter(lax.optimization_barrier([x for x in arguments if _is_data(x)]))
    return tuple(next(pinned) if _is_data(x) else x for x in arguments)


def exact_result(benchmark: Benchmark, arguments: Arguments) -> Any:
    """The reference over the same arguments in float32."""
    wide = [x.astype(jnp.float32) if _is_data(x) else x for x in arguments]
    with jax.default_matmul_precision("highest"):
        return jax.jit(benchmark.reference)(*wide)


def relative_error(found: Any, exact: Any) -> float:
    """||found - exact|| / ||exact||"""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    differences, sizes = zip(
        *((jnp.sum((x.astype(jnp.float32) - y) ** 2), jnp.sum(y * y)) for x, y in pairs),
        strict=True,
    )
    return float(jnp.sqrt(sum(differences) / sum(sizes)))


def _num_bytes(arguments: Arguments) -> int:
    return sum(x.nbytes for x in arguments if x is not None)
