"""Shapes of reduce_add_rms_norm that tests and benchmarks share, and random arguments for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.add_rms_norm.cases import EPS, Case
from pallas_kernels.benchmark import noise
from pallas_kernels.reduce_add_rms_norm import reduce_add_rms_norm
from pallas_kernels.reduce_add_rms_norm.exchange import Tuning
from pallas_kernels.selection import Implementation

AXIS = "model"

# One-shot and two-shot, one row a block and several, a width whose columns 8 devices cannot divide.
TEST_CASES = (
    Case(6, 4096),
    Case(1, 512),
    Case(5, 2560, 2),
    Case(2, 4096, 8),
    Case(48, 4096),
    Case(300, 4096),
    Case(3, 8192),
    Case(40, 8192, 4),
)
BENCHMARK_CASES = (
    *(Case(rows, 4096) for rows in (1, 2, 6, 48, 192, 512)),
    Case(2, 4096, 4),
    Case(6, 4096, 4),
    Case(6, 8192),
    Case(192, 8192),
)


def make_arguments(
    case: Case, devices: int, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, Array, Array]:
    """x [B, H], partials [devices, S, B or more, H] and the weight [H]."""
    partial_dtype = dtype if case.num_splits == 1 else jnp.float32
    padded = (devices, case.num_splits, case.rows + (case.rows == 1), case.hidden)
    return (
        noise(seed, 0, (case.rows, case.hidden), dtype),
        noise(seed, 1, padded, partial_dtype),
        1 + 0.1 * noise(seed, 2, (case.hidden,), dtype),
    )


def on_mesh(
    mesh: Mesh, implementation: Implementation, tuning: Tuning | None = None
) -> Callable[..., tuple[Array, Array]]:
    """reduce_add_rms_norm of the results of ``make_arguments`` and an exchange (or None) over the
    mesh's model axis: the results of all devices, [devices, B, H] each."""

    def of_device(x: Array, partials: Array, weight: Array, exchange: Array | None) -> Any:
        both = reduce_add_rms_norm(
            x, partials[0], weight, EPS, AXIS, exchange, implementation, tuning
        )
        return jax.tree.map(lambda array: array[None], both)

    split = P(AXIS)
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(P(), split, P(), split),
        out_specs=(split, split),
        check_vma=False,
    )
