"""Times the sum over devices, residual addition and norm that follow each row-parallel product.

A program is a chain of such calls, one layer's after the other, as a round of decoding has them:
each call's norm becomes the next call's product by one small operation. On GPUs a pass of the chain
is one CUDA graph, with NCCL's all-reduces as nodes.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.engine.programs.xla_options import compiler_options
from jaxspec.evaluation.benchmarks.compiling import compile_side_by_side
from jaxspec.evaluation.benchmarks.timing import timed
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm.cases import EPS, Case
from pallas_kernels.reduce_add_rms_norm import reduce_add_rms_norm
from pallas_kernels.reduce_add_rms_norm.cases import AXIS, make_arguments
from pallas_kernels.reduce_add_rms_norm.exchange import (
    Tuning,
    exchange_shape,
    make_exchange,
    reachable,
)

Way = Literal["one-shot", "two-shot", "all-reduce"]
WAYS: tuple[Way, ...] = ("one-shot", "two-shot", "all-reduce")
CALLS = 64  # of a pass: as many as a model of 32 layers has in a round
PRODUCT = 2**-6  # what a device's product is of a norm
MOST_JOBS = 24  # programs compiled at a time


@dataclasses.dataclass(frozen=True)
class Sum:
    """A case: rows of a width over so many devices, and the way in which they are summed.

    ``all-reduce`` is XLA's, with the kernel that adds and norms where there is one.
    """

    devices: int
    width: int
    rows: int
    way: Way

    def __str__(self) -> str:
        return f"{self.devices} devices, {self.rows} rows of {self.width}, {self.way}"


def cases(
    devices: Sequence[int], widths: Sequence[int], rows: Sequence[int], ways: Sequence[Way] = WAYS
) -> list[Sum]:
    """All combinations, without those that cannot be: two-shot divides columns among devices."""
    made = (Sum(*sizes) for sizes in itertools.product(devices, widths, rows, ways))
    return [case for case in made if case.way == "all-reduce" or _tuning(case, case.rows)]


def has_kernels(devices: Sequence[int]) -> bool:
    """Whether the kernel runs on all of these first devices."""
    return all(reachable(_mesh(count)) for count in devices)


def _mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), AXIS)


def _tuning(case: Sum, most_rows: int) -> Tuning | None:
    """None: the kernel is not used, or cannot go this way."""
    if case.way == "all-reduce":
        return None
    one_shot = case.way == "one-shot"
    return Tuning.forced(case.devices, case.width, most_rows, one_shot=one_shot)


def time_sums(
    chosen: Sequence[Sum], passes: int, repeats: int, report: Callable[[str], None]
) -> Iterator[tuple[Sum, float, bool]]:
    """Compile all cases, then time one after the other: the median of ``repeats`` programs of so
    many passes each.

    Yields each case, the microseconds of a call, the small operation after it included, and whether
    all devices ended with the same bits, and both ways of the kernel with the same, too.
    """
    bench = _Bench(max(case.rows for case in chosen), passes)
    programs = compile_side_by_side(bench.compiled, chosen, str, MOST_JOBS, report)
    found: dict[Any, np.ndarray] = {}  # what the kernel made of the same arguments
    for case, program in zip(chosen, programs, strict=True):
        arguments = bench.arguments(case)
        result = np.asarray(program(*arguments)).view(np.uint16)  # [devices, B, H]
        same = bool((result == result[0]).all())
        if case.way != "all-reduce":
            sizes = case.devices, case.width, case.rows
            same = same and np.array_equal(found.setdefault(sizes, result), result)
        seconds = statistics.median(timed(program, *arguments)[1] for _ in range(repeats))
        yield case, 1e6 * seconds / (passes * CALLS), same


class _Bench:
    """Programs and arguments of cases of up to ``most_rows`` rows.

    Attributes:
      exchange: the exchange of (devices, width, tuning), which calls of all sizes share.
    """

    def __init__(self, most_rows: int, passes: int):
        self.most_rows, self.passes = most_rows, passes
        self.exchange = functools.cache(_make_exchange)

    def arguments(self, case: Sum) -> list[Array | None]:
        """x [B, H], partials [devices, 1, B, H], the norm's weight [H] and the exchange, where the
        program wants them."""
        sizes, tuning = Case(case.rows, case.width), _tuning(case, self.most_rows)
        made = make_arguments(sizes, case.devices, jnp.bfloat16)
        placed = map(jax.device_put, made, _shardings(_mesh(case.devices)))
        return [*placed, self.exchange(case.devices, case.width, tuning)]

    def compiled(self, case: Sum) -> Callable[..., Array]:
        """A program from the arguments to the sums on all devices, bfloat16 [devices, B, H]."""
        mesh, tuning = _mesh(case.devices), _tuning(case, self.most_rows)
        sizes = Case(case.rows, case.width)
        made = jax.eval_shape(lambda: make_arguments(sizes, case.devices, jnp.bfloat16))
        shapes = [
            jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            for shape, sharding in zip(made, _shardings(mesh), strict=True)
        ]
        memory = tuning and exchange_shape(mesh, AXIS, case.width, tuning)
        somewhere = jax.device_put(jnp.zeros(()), NamedSharding(mesh, P()))
        options = compiler_options(somewhere, deterministic=False)
        program = jax.jit(self._program(case.way, mesh, tuning), compiler_options=options)
        return program.lower(*shapes, memory).compile()

    def _program(self, way: Way, mesh: Mesh, tuning: Tuning | None) -> Callable[..., Array]:
        kernel = "mosaic_gpu" if reachable(mesh) else "reference"

        def summed(x: Array, product: Array, weight: Array, memory: Array | None) -> Any:
            if way == "all-reduce":
                return add_rms_norm(x, lax.psum(product, AXIS)[None], weight, EPS, kernel)
            how = AXIS, memory, kernel, tuning
            return reduce_add_rms_norm(x, product[None], weight, EPS, *how)

        def of_device(x: Array, partials: Array, weight: Array, memory: Array | None) -> Array:
            def one_pass(_: Any, both: tuple[Array, Array]) -> tuple[Array, Array]:
                for _ in range(CALLS):
                    x, normed = lax.optimization_barrier(summed(*both, weight, memory))
                    both = lax.optimization_barrier((x, normed * jnp.bfloat16(PRODUCT)))
                return both

            start = x, partials[0, 0, : len(x)]
            return lax.fori_loop(0, self.passes, one_pass, start)[0][None]

        split = P(AXIS)
        specs = (P(), split, P(), split)
        return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)


def _make_exchange(devices: int, width: int, tuning: Tuning | None) -> Array | None:
    return None if tuning is None else make_exchange(_mesh(devices), AXIS, width, tuning)


def _shardings(mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Shardings of x, partials and the norm's weight."""
    return tuple(NamedSharding(mesh, spec) for spec in (P(), P(AXIS), P()))
