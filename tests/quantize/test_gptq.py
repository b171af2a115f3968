"""GPTQ beside the paper's loop over columns, written out in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.quantize.gptq import GptqConfig, Order, gptq, inverse_factor
from jaxspec.quantize.rounding import Grid, output_error, round_to_nearest
from tests.helpers.compilations import Compilations

SIZE, OUTPUTS = 32, 12


def problem(seed: int = 0, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the Hessian of correlated inputs of different sizes."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(size, size)) * rng.uniform(0.1, 3.0, size)
    inputs = rng.normal(size=(400, size)) @ mixing
    weight = rng.normal(size=(OUTPUTS, size))
    return weight.astype(np.float32), (inputs.T @ inputs).astype(np.float32)


def fitted(group: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """The scale and zero of weights [out, size]."""
    half = 2 ** (grid.bits - 1)
    low, high = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
    if grid.symmetric:
        high = np.abs(group).max(1)
        low = -high
    scale = ((high - low) / (2 * half - 1)).astype(np.float16).astype(np.float64)
    if grid.symmetric:
        return scale, np.zeros_like(scale)
    return scale, np.clip(np.rint(-half - low / scale), -half, half - 1)


def reference(
    weight: np.ndarray, hessian: np.ndarray, grid: Grid, order: Order, damping: float
) -> np.ndarray:
    """Dense weights. Each step removes a column from the inverse of the Hessian of those left."""
    size, half = weight.shape[1], 2 ** (grid.bits - 1)
    group = grid.group or size
    weight, hessian = weight.astype(np.float64), hessian.astype(np.float64)
    hessian = hessian + damping * np.diag(hessian).mean() * np.eye(size)
    columns = list(range(size))
    if order != "inputs":
        columns = list(np.argsort(-np.diag(hessian), kind="stable"))
    left, result = list(columns), np.zeros_like(weight)
    static = [fitted(weight[:, i : i + group], grid) for i in range(0, size, group)]
    for place, column in enumerate(columns):
        if order == "static":
            scale, zero = static[column // group]
        elif place % group == 0:
            scale, zero = fitted(weight[:, columns[place : place + group]], grid)
        value = np.clip(np.rint(weight[:, column] / scale + zero), -half, half - 1)
        result[:, column] = (value - zero) * scale
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])  # the first of them is the column
        error = (weight[:, column] - result[:, column]) / inverse[0, 0]
        weight[:, left] -= np.outer(error, inverse[0])
        left.remove(column)
    return result


@pytest.mark.parametrize(
    ("order", "grid"),
    [
        ("inputs", Grid(4, 8, True)),
        ("inputs", Grid(3, None, False)),
        ("static", Grid(4, 8, False)),
        ("mixed", Grid(4, 8, True)),
    ],
)
def test_it_is_the_papers_loop(order: Order, grid: Grid):
    weight, hessian = problem()
    [found] = gptq([jnp.asarray(weight)], jnp.asarray(hessian), grid, GptqConfig(order, 0.01))
    wanted = reference(weight, hessian, grid, order, 0.01)
    np.testing.assert_allclose(found.dense(), wanted, atol=2e-3)
    assert (found.groups is not None) == (order == "mixed")
    if order == "mixed":
        assert sorted(np.asarray(found.groups)) == sorted(list(range(4)) * 8)


def test_blocks_do_not_change_the_result():
    """96 inputs are three blocks."""
    weight, hessian = problem(1, 96)
    cases: list[tuple[Order, Grid]]
    cases = [("inputs", Grid(4, None, True)), ("static", Grid(4, 16, False))]
    for order, grid in cases:
        [found] = gptq([jnp.asarray(weight)], jnp.asarray(hessian), grid, GptqConfig(order, 0.01))
        wanted = reference(weight, hessian, grid, order, 0.01)
        off = np.abs(np.asarray(found.dense()) - wanted) > 2e-3
        assert off.mean() < 0.01  # float32 may round a weight in the middle to the other side


@pytest.mark.parametrize("order", ["static", "mixed"])
def test_weights_with_the_same_inputs_go_together(order: Order):
    weight, hessian = map(jnp.asarray, problem())
    grid, config = Grid(4, 8, False), GptqConfig(order)
    [whole] = gptq([weight], hessian, grid, config)
    parts = gptq([weight[:5], weight[5:]], hessian, grid, config)
    assert [len(part.scale) for part in parts] == [5, OUTPUTS - 5]
    dense = np.concatenate([part.dense() for part in parts])
    np.testing.assert_array_equal(dense, whole.dense())


def test_the_factor_is_that_of_the_inverse():
    _, hessian = problem()
    factor = np.asarray(inverse_factor(jnp.asarray(hessian), 0.01), np.float64)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(SIZE)
    assert not np.tril(factor, -1).any()
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(SIZE), atol=2e-3)


def test_outputs_change_less_than_by_rounding():
    weight, hessian = map(jnp.asarray, problem(2))
    grid = Grid(3, 8, True)
    rounded = output_error(weight, round_to_nearest(weight, grid).dense(), hessian)
    for order in ("inputs", "static", "mixed"):
        [found] = gptq([weight], hessian, grid, GptqConfig(order))
        assert output_error(weight, found.dense(), hessian) < 0.75 * rounded


def test_inputs_that_are_always_zero_are_rounded():
    weight, hessian = problem()
    hessian[5] = hessian[:, 5] = 0
    grid = Grid(4, 8, True)
    [found] = gptq([jnp.asarray(weight)], jnp.asarray(hessian), grid, GptqConfig("static"))
    wanted = round_to_nearest(jnp.asarray(weight), grid).dense()
    np.testing.assert_array_equal(found.dense()[:, 5], wanted[:, 5])


def test_equal_inputs_need_more_damping_or_none():
    """A Hessian of rank 1."""
    weight, ones = jnp.asarray(problem()[0]), jnp.ones((SIZE, SIZE)) * 1e6
    [found] = gptq([weight], ones, Grid(4, 8, True), GptqConfig("inputs", 1e-9))
    assert np.isfinite(np.asarray(found.dense())).all()
    with pytest.raises(ValueError, match="not finite"):
        gptq([weight], ones * jnp.nan, Grid(4, 8, True), GptqConfig())


def test_nothing_is_rounded_before_there_is_a_factor(compilations: Compilations):
    weight, hessian = jnp.ones((2, 48)), jnp.full((48, 48), jnp.nan)  # sizes of no other test
    with pytest.raises(ValueError, match="not finite"):
        gptq([weight], hessian, Grid(4, 8, True), GptqConfig())
    names = {name for name, _ in compilations}
    assert "jit(_ordered_factor)" in names and "jit(_round_together)" not in names


def test_damping_is_a_share():
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        GptqConfig(damping=2)
