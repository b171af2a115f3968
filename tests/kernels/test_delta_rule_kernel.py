"""The gated delta rule of trees: the Hopper kernels interpreted, lowered, run, beside the
recurrence with a state per node."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule import delta_commit, delta_read, misfit
from pallas_kernels.delta_rule.cases import TEST_CASES, Case, make_arguments
from pallas_kernels.delta_rule.mosaic_gpu import delta_commit_mosaic, delta_read_mosaic
from tests.marks import first_is_fast

TOLERANCE = 2e-5


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        difference = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max()
        assert difference < TOLERANCE


@first_is_fast(TEST_CASES)
def test_interpreted_they_are_the_reference(case: Case):
    reading, committing = make_arguments(case)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = delta_read_mosaic(*reading, interpret=interpret)
    jax.block_until_ready(out)  # the interpreter's callbacks run jax, too
    assert_close(out, delta_read(*reading))
    after = delta_commit_mosaic(*committing, interpret=interpret)
    jax.block_until_ready(after)
    assert_close(after, delta_commit(*committing))


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_they_lower_for_cuda(case: Case):
    reading, committing = jax.eval_shape(lambda: make_arguments(case))
    for function, arguments in ((delta_read, reading), (delta_commit, committing)):
        kernel = jax.jit(functools.partial(function, implementation="mosaic_gpu"))
        assert kernel.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(32, 16, 16, capacity=32)], ids=str)
def test_on_the_device_they_are_the_reference(case: Case):
    reading, committing = make_arguments(case)
    for function, arguments in ((delta_read, reading), (delta_commit, committing)):
        kernel = jax.jit(functools.partial(function, implementation="mosaic_gpu"))
        first = kernel(*arguments)
        assert_close(first, function(*arguments))
        for _ in range(20):
            again = kernel(*arguments)
            same = map(jnp.array_equal, jax.tree.leaves(first), jax.tree.leaves(again))
            assert all(same), "a race"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(1, 1, k_dim=64), "of 128 keys"),
        (Case(1, 1, values=8), "8 value heads of 128"),
        (Case(1, 65), "trees of 65 nodes: at most 64"),
    ],
    ids=["keys", "values", "nodes"],
)
def test_unsupported_arguments_are_named(case: Case, message: str):
    reading, _ = make_arguments(case)
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        delta_read(*reading, implementation="mosaic_gpu")


def test_paths_longer_than_the_window_are_refused():
    (s, *_), committing = make_arguments(Case(1, 6, capacity=4))
    longer = list(committing)
    longer[7] = jnp.zeros((1, 5), jnp.int32)  # the path
    with pytest.raises(ValueError, match="paths of 5 tokens: at most 4, the window's size"):
        delta_commit(*longer, implementation="mosaic_gpu")
    assert misfit(s, capacity=4, num_nodes=6, longest_path=4) is None
