"""Benchmarks of what many rows take through experts: ``jax.lax.ragged_dot`` beside every expert.

Engines multiply more rows than the kernel ``expert_product`` takes by every expert, in two dense
products (models/mlps/mix.py), and never call ``ragged_dot``. Here it is the call that is timed, and
every expert is its reference: the column "XLA us".
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.mlps.mix import LocalExperts, every_expert
from jaxspec.models.mlps.routing import Routes
from pallas_kernels.benchmark import Arguments, Benchmark, noise
from pallas_kernels.expert_product.cases import Case
from pallas_kernels.expert_product.cases import make_arguments as rows_and_experts

# A layer of Qwen3-30B-A3B. As XLA multiplies (jax 0.12), 2,048 rows take 9 GB of temporaries or
# more: 16,384 rows of 2,048 entries are repeated for each of 128 experts.
CASES = tuple(Case(rows, 8, 128, 2048, 768) for rows in (512, 1024, 2048))
RATE = 5e14  # FLOP/s of a dense product, about; it decides only how many calls are timed


def benchmarks() -> Sequence[Benchmark]:
    return [benchmark(case) for case in CASES]


def benchmark(case: Case) -> Benchmark:
    """``ragged_dot``, with every expert as its reference."""
    products = 6 * case.rows * case.num_experts * case.hidden * case.units  # of every expert
    weights = 3 * case.num_chosen * case.hidden * case.units
    return Benchmark(
        name=f"ragged_dot, {case}",
        make_arguments=lambda seed: make_arguments(case, seed),
        call=_by_groups,
        reference=_by_every_expert,
        feed=_feed,
        num_bytes=2 * (weights + 2 * case.rows * case.hidden),
        flops=6 * case.rows * case.k * case.hidden * case.units,
        implementation="reference",
        seconds=products / RATE,
        reference_seconds=products / RATE,
    )


def make_arguments(case: Case, seed: int) -> tuple[Array, ...]:
    """Rows [N, H], their experts and weights [N, k], and all experts' weights."""
    x, experts, gate_up, down, _ = rows_and_experts(case, jnp.bfloat16, seed)
    weights = jax.nn.softmax(noise(seed, 4, experts.shape))
    return x, experts, weights, gate_up, down


def ragged_experts(mlp: LocalExperts, x: Array, routes: Routes) -> Array:
    """What ``every_expert`` returns, float32 [N, H], on a device with all experts, without biases.

    Choices are sorted by expert, and ``ragged_dot`` multiplies the rows of each group.
    """
    num_experts, k = mlp.gate_up.num_experts, routes.experts.shape[1]
    experts = routes.experts.reshape(-1)
    order = jnp.argsort(experts, stable=True)  # [N * k]
    sizes = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
    gate_up = mlp.gate_up.weight.reshape(num_experts, x.shape[-1], -1)  # [E, H, 2 * F]

    def product(rows: Array, weight: Array) -> Array:
        return lax.ragged_dot(rows, weight, sizes, preferred_element_type=jnp.float32)

    both = product(x[order // k], gate_up).reshape(len(order), 2, -1)
    weights = routes.weights.reshape(-1)[order]
    units = mlp.hidden_units(both, weights, jnp.ones(len(order), bool))
    mixed = product(units, mlp.down.weight)
    return mixed[jnp.argsort(order)].reshape(*routes.experts.shape, -1).sum(axis=1)


def _by_groups(x: Array, experts: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    return ragged_experts(_experts_here(gate_up, down), x, Routes(experts, weights)).astype(x.dtype)


def _by_every_expert(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array
) -> Array:
    return every_expert(_experts_here(gate_up, down), x, Routes(experts, weights)).astype(x.dtype)


def _experts_here(gate_up: Array, down: Array) -> LocalExperts:
    return LocalExperts(
        gate_up=ExpertLinear(weight=gate_up, axes=()),
        down=ExpertLinear(weight=down, axes=()),
        first=0,
        activation=None,
    )


def _feed(arguments: Arguments, output: Array) -> Arguments:
    """x depends on the output, and is nearly as before."""
    x, *rest = arguments
    assert x is not None
    return (x + 1e-6 * output, *rest)
