"""Times single operations, as chains of calls inside one program.

A chain goes through more data than the GPU's cache holds, unless the benchmark asks for data in the
cache (see Benchmark.rotates).
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.evaluation.benchmarks.timing import timed
from pallas_kernels.benchmark import Arguments, Benchmark
from pallas_kernels.float8 import is_float8

MIN_CHAIN = 16  # calls in the body of the timed loop; an iteration itself costs about 10 us
CALL_SECONDS = 1e-5  # expected least duration of a call
MAX_SETS = 64  # sets of arguments; small ones then stay in the cache, as they do between layers


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is timed.

    Attributes:
      rotation_bytes: bytes of arguments before any is used again; several times the cache's size.
      seconds: approximate least duration of one timed program.
      repeats: number of timed programs, of which the median is taken.
      beside_reference: the reference is timed, too, and errors are computed. Without it a case is
        one program instead of three.
    """

    rotation_bytes: int
    seconds: float
    repeats: int
    beside_reference: bool = True


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The highest rates measured on the device."""

    bandwidth: float  # bytes/s
    product_rate: float  # FLOP/s

    def floor(self, benchmark: Benchmark) -> tuple[float, str]:
        """The least seconds that a call can take, and what bounds it: memory or compute."""
        memory = benchmark.num_bytes / self.bandwidth
        compute = benchmark.flops / self.product_rate
        return max((memory, "memory"), (compute, "compute"))


@dataclasses.dataclass(frozen=True)
class KernelTiming:
    """A case: our function and its jnp reference, with errors relative to the reference in float32;
    None where the plan leaves the reference out."""

    seconds: float
    reference_seconds: float | None
    error: float | None
    reference_error: float | None
    floor_seconds: float
    bound: str


@dataclasses.dataclass(frozen=True)
class CompiledBenchmark:
    """The programs of one case: chains of calls, and the errors of a single call.

    Attributes:
      num_sets: sets of arguments that the chains go through.
      calls, reference_calls: number of calls in a chain's program.
      reference_chain, errors: None where the plan leaves the reference out.
    """

    benchmark: Benchmark
    num_sets: int
    calls: int
    reference_calls: int
    chain: Callable[..., Any]
    reference_chain: Callable[..., Any] | None
    errors: Callable[..., Any] | None


def compile_benchmark(benchmark: Benchmark, peaks: Peaks, plan: Plan) -> CompiledBenchmark:
    """Compile a case from the shapes of its arguments. May run in several threads at a time."""
    shapes: Arguments = jax.eval_shape(lambda: benchmark.make_arguments(0))
    rotation_bytes = plan.rotation_bytes if benchmark.rotates else 0
    num_sets = min(max(1, -(-rotation_bytes // _num_bytes(shapes))), MAX_SETS)
    length = max(num_sets, MIN_CHAIN)
    least = max(peaks.floor(benchmark)[0], CALL_SECONDS)
    tables, data = _split([shapes] * num_sets)

    def passes(seconds: float) -> int:
        return max(1, round(plan.seconds / max(least, seconds)) // length)

    def compiled(call: Callable[..., Any], passes: int) -> Callable[..., Any]:
        program = _chain(call, benchmark.feed, shapes, length, passes)
        return jax.jit(program).lower(tables, data).compile()

    num_passes, other = passes(benchmark.seconds), passes(benchmark.reference_seconds)
    reference_chain = errors = None
    if plan.beside_reference:
        reference_chain = compiled(benchmark.reference, other)
        errors = jax.jit(functools.partial(_errors, benchmark)).lower(*shapes).compile()
    return CompiledBenchmark(
        benchmark=benchmark,
        num_sets=num_sets,
        calls=1 + num_passes * length,
        reference_calls=1 + other * length,
        chain=compiled(benchmark.call, num_passes),
        reference_chain=reference_chain,
        errors=errors,
    )


def time_benchmark(compiled: CompiledBenchmark, peaks: Peaks, plan: Plan) -> KernelTiming:
    """Time a case and compare its results."""
    benchmark = compiled.benchmark
    sets = [benchmark.make_arguments(seed) for seed in range(compiled.num_sets)]
    tables, data = _split(sets)

    def seconds(program: Callable[..., Any], calls: int) -> float:
        jax.block_until_ready(program(tables, data))
        runs = [timed(program, tables, data)[1] for _ in range(plan.repeats)]
        return statistics.median(runs) / calls

    floor, bound = peaks.floor(benchmark)
    error = reference_error = reference_seconds = None
    if compiled.errors is not None:
        error, reference_error = map(float, compiled.errors(*sets[0]))
    call_seconds = seconds(compiled.chain, compiled.calls)
    if compiled.reference_chain is not None:
        reference_seconds = seconds(compiled.reference_chain, compiled.reference_calls)
    return KernelTiming(
        seconds=call_seconds,
        reference_seconds=reference_seconds,
        error=error,
        reference_error=reference_error,
        floor_seconds=floor,
        bound=bound,
    )


def _chain(
    call: Callable[..., Any],
    feed: Callable[[Arguments, Any], Arguments],
    shapes: Arguments,
    length: int,
    passes: int,
) -> Callable[..., Any]:
    """A program of one call, and a loop over chains of ``length`` calls that rotate through data.

    *Data* are floating-point arrays of the arguments, packed ones too. The others (tables, lengths,
    masks) are those of the first set for all calls. Values computed from them only are computed
    once per chain, as the layers of a model share them. Each call depends on the one before it and
    on its data, so no work on data is shared between calls or moved out of the loop.
    """
    traced_once = jax.jit(call)
    leaves, structure = jax.tree.flatten(shapes)

    def program(tables: Sequence[Array | None], data: Sequence[Sequence[Array]]) -> Any:
        def arguments(index: int) -> Arguments:
            data_set = iter(data[index % len(data)])
            places = zip(leaves, tables, strict=True)
            made = [next(data_set) if _is_data(leaf) else table for leaf, table in places]
            return jax.tree.unflatten(structure, made)

        def chain(_: Array, output: Any) -> Any:
            for index in range(length):
                output = traced_once(*_pinned(feed(arguments(index), output)))
            return output

        return lax.fori_loop(0, passes, chain, traced_once(*arguments(0)))

    return program


def _split(sets: Sequence[Arguments]) -> tuple[list[Array | None], list[list[Array]]]:
    """The tables of the first set (None for data), and the data of all sets; see _chain."""
    tables = [None if _is_data(x) else x for x in jax.tree.leaves(sets[0])]
    return tables, [list(filter(_is_data, jax.tree.leaves(arguments))) for arguments in sets]


def _is_data(x: Array) -> bool:
    return _is_float(x) or is_float8(x) or x.dtype == jnp.int4


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _pinned(arguments: Arguments) -> Arguments:
    """The same arguments, with an optimization barrier around the floating-point arrays."""
    leaves, structure = jax.tree.flatten(arguments)
    pinned = iter(lax.optimization_barrier(list(filter(_is_data, leaves))))
    return jax.tree.unflatten(structure, [next(pinned) if _is_data(x) else x for x in leaves])


def _errors(benchmark: Benchmark, *arguments: Any) -> tuple[Array, Array]:
    """Relative errors of the call and its reference, against the reference in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_float(x) else x, arguments)
    with jax.default_matmul_precision("highest"):
        exact = benchmark.reference(*wide)
    results = benchmark.call(*arguments), benchmark.reference(*arguments)
    error, reference_error = (relative_error(result, exact) for result in results)
    return error, reference_error


def relative_error(found: Any, exact: Any) -> Array:
    """||found - exact|| / ||exact||, the largest over all results; ||found|| if exact is 0."""
    errors = []
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        wide, wanted = x.astype(jnp.float32), y.astype(jnp.float32)
        size = jnp.linalg.norm(wanted.ravel())
        error = jnp.linalg.norm((wide - wanted).ravel())
        errors.append(error / jnp.where(size > 0, size, 1.0))
    return jnp.stack(errors).max()


def _num_bytes(arguments: Arguments) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
