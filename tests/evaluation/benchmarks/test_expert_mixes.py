"""What is timed beside every expert gives the same results."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.commands.bench import kernels as bench_kernels
from jaxspec.evaluation.benchmarks import expert_mixes
from jaxspec.evaluation.benchmarks.kernels import Peaks, Plan, compile_benchmark, time_benchmark
from jaxspec.models.mlps.mix import every_expert
from pallas_kernels.expert_product.cases import Case
from tests.helpers.random_experts import random_own, random_rows, written_out


def test_products_by_groups_are_those_of_every_expert():
    own = random_own(8, 32, 24, None)
    x, routes = random_rows(70, 32, 8, 3, seed=1)
    routes = routes._replace(experts=jnp.where(routes.experts == 5, 6, routes.experts))  # a gap
    found = jax.jit(expert_mixes.ragged_experts)(own, x, routes)
    np.testing.assert_allclose(found, written_out(own, x, routes), rtol=0, atol=2e-5)
    distinct = random_rows(70, 32, 8, 3, seed=1)[1]
    found = jax.jit(expert_mixes.ragged_experts)(own, x, distinct)
    np.testing.assert_allclose(found, every_expert(own, x, distinct), rtol=0, atol=1e-5)


def test_it_is_timed_beside_every_expert():
    benchmark = expert_mixes.benchmark(Case(24, 2, 6, 64, 32))
    peaks, plan = Peaks(1e9, 1e9), Plan(rotation_bytes=0, seconds=1e-6, repeats=1)
    timing = time_benchmark(compile_benchmark(benchmark, peaks, plan), peaks, plan)
    assert timing.seconds > 0 and timing.reference_seconds
    assert timing.error is not None and 0 < timing.error < 0.02
    assert timing.reference_error is not None and 0 < timing.reference_error < 0.02


def test_sizes_that_are_timed():
    names = [one.name for one in bench_kernels.OPERATIONS["expert_mixes"]()]
    assert names == [
        f"ragged_dot, {rows} rows, 8 of 128 x 2048 x 768" for rows in (512, 1024, 2048)
    ]
    largest = expert_mixes.benchmarks()[-1]
    assert largest.flops == 6 * 2048 * 8 * 2048 * 768
