"""The gated delta rule of trees and prompts: the Hopper kernels interpreted, lowered, run, beside
the recurrence with a state per node."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import LayerRows, delta_commit, delta_read, delta_run
from pallas_kernels.delta_rule.cases import TEST_CASES, Case, make_arguments, make_run_arguments
from pallas_kernels.delta_rule.commit import launches_of
from pallas_kernels.delta_rule.mosaic_gpu import (
    delta_commit_mosaic,
    delta_read_mosaic,
    delta_run_mosaic,
)
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

TOLERANCE = 4e-5  # of outputs up to 3
RUNS = (
    Case(1, 6, groups=1, v_dim=64, capacity=16),
    Case(2, 5, capacity=16),
    Case(4, 20, groups=1, v_dim=64, capacity=16),
    Case(3, 40, groups=1, values=4, capacity=32),
    Case(3, 100, groups=1, values=3, capacity=16),
)


# The references and their arguments, each in one program instead of one for each operation.
read, commit, run = (
    jax.jit(function, compiler_options=FAST_COMPILE)
    for function in (delta_read, delta_commit, delta_run)
)


def made(make: Callable[[Case], Any], case: Case) -> Any:
    return jax.jit(functools.partial(make, case))()


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        difference = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max()
        assert difference < TOLERANCE


@first_is_fast(TEST_CASES)
def test_interpreted_they_are_the_reference(case: Case):
    reading, committing = made(make_arguments, case)
    out = interpreted(delta_read_mosaic, *reading, detect_races=True)
    assert_close(out, read(*reading))
    after = interpreted(delta_commit_mosaic, *committing, detect_races=True)
    assert_close(after, commit(*committing))


def commit_of_layers(case: Case, number: int) -> tuple:
    """Arguments of a commit of so many layers, which differ."""
    committing = [make_arguments(case, seed)[1] for seed in range(number)]
    _, *how = committing[0]
    return [layer for [layer], *_ in committing], *how


@pytest.mark.parametrize("number", [2, slow(7)])
def test_a_commit_of_layers_is_that_of_each(number: int):
    """7: in two launches."""
    case = Case(1, 2, groups=1, values=1, capacity=2)
    committing = made(functools.partial(commit_of_layers, number=number), case)
    after = interpreted(delta_commit_mosaic, *committing, detect_races=True)
    assert_close(after, commit(*committing))


@pytest.mark.parametrize(("number", "launches"), [(3, 1), (6, 1), (30, 5), (32, 6)])
def test_launches_commit_layers_in_their_order(number: int, launches: int):
    layers: list[Any] = list(range(number))
    found: list[Any] = list(launches_of(layers))
    assert [layer for some in found for layer in some] == layers
    assert len(found) == launches
    assert max(map(len, found)) - min(map(len, found)) <= 1


@first_is_fast(RUNS)
def test_interpreted_a_run_is_the_reference(case: Case):
    arguments = made(make_run_arguments, case)
    found = interpreted(delta_run_mosaic, *arguments, detect_races=True)
    assert_close(found, run(*arguments))


@pytest.mark.parametrize("case", RUNS, ids=str)
def test_a_run_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: make_run_arguments(case))
    lowered(functools.partial(delta_run, implementation="mosaic_gpu"), *arguments)


@pytest.mark.slow
def test_how_calls_cut_a_prompt_changes_no_bit():
    """Behind a window of 5 tokens, 11 fill it; the other 29 begin with an empty one."""
    case = Case(1, 40, groups=1, v_dim=64, capacity=16)
    states, _, q, tokens = made(make_run_arguments, case)
    states = states._replace(held=np.array([5]))
    whole, after = interpreted(delta_run_mosaic, states, np.array([40]), q, tokens)

    def part(states: Any, begin: int, end: int) -> Any:
        cut = jax.tree.map(lambda x: x[:, begin:end], (q, tokens))
        return interpreted(delta_run_mosaic, states, np.array([end - begin]), *cut)

    first, between = part(states, 0, 11)
    second, last = part(states._replace(s=between, held=np.array([0])), 11, 40)
    assert np.array_equal(np.concatenate([first, second], axis=1), whole)
    assert np.array_equal(last, after)


@pytest.mark.slow
def test_padding_is_not_read():
    """Tokens past a row's count may be NaN."""
    states, counts, q, tokens = made(make_run_arguments, RUNS[2])
    there = np.arange(20) < np.asarray(counts)[:, None]

    def spoiled(x: Any) -> Any:
        return jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, jnp.nan)

    noisy = jax.tree.map(spoiled, (q, tokens))
    found = interpreted(delta_run_mosaic, states, counts, *noisy)
    assert all(map(np.array_equal, found, interpreted(delta_run_mosaic, states, counts, q, tokens)))


@pytest.mark.slow  # by default: a run and a round by themselves, above
def test_runs_and_rounds_leave_the_same_state():
    """A run, and the same tokens accepted from a tree that is a chain."""
    case = Case(2, 7, groups=1, v_dim=64)
    states, _, q, tokens = made(make_run_arguments, case)
    states, whole = states._replace(held=np.array([3, 6])), np.array([7, 7])
    out, after = run(states, whole, q, tokens)
    before, new = (jnp.zeros(shape) for shape in ((len(states.s), 3, 1, 8), (2, 7, 1, 8)))
    path = np.broadcast_to(np.arange(7), (2, 7))
    layer = LayerRows(states.s, states.window, before, tokens, new)
    [(committed, _, _)] = commit([layer], states.rows, states.held, path, whole)
    assert_close(after, committed)
    chain = np.tri(7, dtype=bool)[None].repeat(2, 0)
    assert_close(out, read(states, q, tokens, chain, path))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*RUNS, Case(8, 512, 16, capacity=32)], ids=str)
def test_on_the_device_a_run_is_the_reference(case: Case):
    arguments = make_run_arguments(case)
    kernel = jax.jit(functools.partial(delta_run, implementation="mosaic_gpu"))
    first = kernel(*arguments)
    assert_close(first, run(*arguments))
    for _ in range(20):
        again = kernel(*arguments)
        assert all(map(jnp.array_equal, first, again)), "a race"


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_they_lower_for_cuda(case: Case):
    reading, committing = jax.eval_shape(lambda: make_arguments(case))
    for function, arguments in ((delta_read, reading), (delta_commit, committing)):
        lowered(functools.partial(function, implementation="mosaic_gpu"), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [6, 7])
def test_on_the_device_a_commit_of_layers_is_that_of_each(number: int):
    committing = commit_of_layers(Case(3, 4, 16, capacity=16), number)
    kernel = jax.jit(functools.partial(delta_commit, implementation="mosaic_gpu"))
    first = kernel(*committing)
    assert_close(first, delta_commit(*committing))
    for _ in range(20):
        again = kernel(*committing)
        assert all(map(jnp.array_equal, *map(jax.tree.leaves, (first, again)))), "a race"


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
    reading, _ = jax.eval_shape(lambda: make_arguments(case))
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        jax.eval_shape(functools.partial(delta_read, implementation="mosaic_gpu"), *reading)


def test_windows_that_runs_cannot_take_are_named():
    arguments = jax.eval_shape(lambda: make_run_arguments(Case(1, 5, capacity=8)))
    with pytest.raises(ValueError, match="windows of 8 tokens: a multiple of 16"):
        jax.eval_shape(functools.partial(delta_run, implementation="mosaic_gpu"), *arguments)


def test_paths_longer_than_the_window_fold_it_as_often_as_it_is_full():
    case = Case(2, 6, groups=1, v_dim=64, capacity=2)
    _, (layers, rows, *_) = made(make_arguments, case)
    held, counts = np.array([1, 0], np.int32), np.array([5, 3], np.int32)
    path = np.array([[0, 1, 3, 4, 5], [0, 2, 3, 0, 0]], np.int32)
    committing = layers, rows, held, path, counts
    after = interpreted(delta_commit_mosaic, *committing, detect_races=True)
    assert_close(after, commit(*committing))
