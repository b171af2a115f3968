"""A tree read by one triangular system, beside the recurrence with a state per node."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import delta_read
from pallas_kernels.delta_rule.cases import TEST_CASES, Case, make_arguments
from pallas_kernels.delta_rule.tokens import Tokens
from pallas_kernels.delta_rule.transform import transform_read
from pallas_kernels.paged_attention.cases import random_parents
from tests.helpers.marks import first_is_fast

jit_transform, jit_read = jax.jit(transform_read, static_argnames="levels"), jax.jit(delta_read)
TOLERANCE = 3e-6  # outputs are of up to about 3
CASES = (
    Case(3, 64, groups=1, capacity=32),
    *TEST_CASES,
    Case(2, 33, groups=1, v_dim=64, capacity=5),
    Case(2, 1, v_dim=64, capacity=1),
    Case(32, 16, groups=1, capacity=32),
)


def assert_the_same(
    arguments: Any, levels: int | None = None, tolerance: float = TOLERANCE
) -> None:
    found, expected = (
        np.asarray(one, np.float64)
        for one in (jit_transform(*arguments, levels=levels), jit_read(*arguments))
    )
    assert np.abs(found - expected).max() < tolerance


def replaced(arguments: Any, ancestors: np.ndarray) -> tuple:
    """The same arguments with other trees."""
    depth = ancestors.sum(-1, dtype=np.int32) - 1
    return *arguments[:-2], jnp.asarray(ancestors), jnp.asarray(depth)


def random_ancestors(seed: int, batch: int, size: int, max_depth: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ancestors = np.broadcast_to(np.eye(size, dtype=bool), (batch, size, size)).copy()
    for own in ancestors:
        for node, parent in enumerate(random_parents(rng, size, max_depth)[1:], 1):
            own[node] |= own[parent]
    return ancestors


@first_is_fast(CASES, 3)
def test_it_is_the_reference(case: Case):
    """Of trees whose roots come after the window; several may be of depth 0."""
    arguments, _ = make_arguments(case)
    assert_the_same(arguments)
    assert_the_same(arguments, levels=int(arguments[-1].max()) + 1)


@pytest.mark.parametrize("size", [40, pytest.param(64, marks=pytest.mark.slow)])
def test_deep_random_trees(size: int):
    case = Case(4, size, groups=1, values=1, v_dim=64, capacity=8)
    for seed in range(3):
        arguments, _ = make_arguments(case, seed)
        ancestors = random_ancestors(seed, case.batch, size, max_depth=16)
        assert_the_same(replaced(arguments, ancestors), levels=17)


def test_a_chain_of_equal_keys():
    """Powers of its system, without decay, would have entries of up to 1e18."""
    case = Case(1, 64, groups=1, v_dim=64)
    arguments, _ = make_arguments(case)
    *before, nodes, _, _ = arguments
    ones, no_decay = jnp.ones_like(nodes.beta), jnp.zeros_like(nodes.g)
    alike = jnp.broadcast_to(nodes.k[:, :1], nodes.k.shape)
    chain = np.tri(64, dtype=bool)[None]
    assert_the_same(replaced((*before, Tokens(alike, nodes.v, no_decay, ones), 0, 0), chain))


def test_what_the_window_does_not_hold_is_not_read():
    arguments, _ = make_arguments(Case(2, 6, groups=1, v_dim=64))
    s, window, rows, held, *rest = arguments
    past = jnp.arange(window.k.shape[1]) >= jnp.zeros(len(s), int).at[rows].set(held)[:, None]
    unread = Tokens(
        *(jnp.where(past.reshape(*past.shape, *(1,) * (x.ndim - 2)), jnp.nan, x) for x in window)
    )
    found, expected = (jit_transform(s, x, rows, held, *rest) for x in (unread, window))
    assert jnp.array_equal(found, expected)


@pytest.mark.parametrize("case", [CASES[0], Case(1, 8, groups=16, capacity=32)], ids=str)
def test_it_lowers_for_cuda(case: Case):
    """In products alone: without a loop, or a call of a library's solver."""
    arguments = jax.eval_shape(lambda: make_arguments(case)[0])
    lowered = jax.jit(transform_read).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "dot_general" in text
    assert "while" not in text and "triangular_solve" not in text and "custom_call" not in text


@pytest.mark.gpu
@first_is_fast([*CASES, Case(8, 64, groups=16, capacity=32)], len(CASES) + 1)
def test_on_the_device_it_is_the_reference(case: Case):
    arguments, _ = make_arguments(case)
    assert_the_same(arguments, tolerance=2e-5)
