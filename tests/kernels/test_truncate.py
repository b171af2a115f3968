"""The threshold of top-k, top-p and min-p: by sorting, by the kernel interpreted, lowered, run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.truncate import truncation_threshold
from pallas_kernels.truncate.cases import (
    BENCHMARK_CASES,
    EXTREME,
    LARGE_CASES,
    MIXED,
    SMALL_CASES,
    TEST_CASES,
    Case,
    Rule,
    make_arguments,
)
from pallas_kernels.truncate.mosaic_gpu import truncation_threshold_mosaic
from pallas_kernels.truncate.reference import ordered_keys, search_digits
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast
from tests.helpers.programs import FAST_COMPILE

run = jax.jit(truncation_threshold, compiler_options=FAST_COMPILE)
SUM_ROUNDING = 3e-6  # relative, of float32 sums in different orders
KERNEL: Any = functools.partial(truncation_threshold, implementation="mosaic_gpu")


def by_sorting(logits: np.ndarray, rule: Rule, slack: float) -> np.ndarray:
    """Thresholds of rows [N, V], ``slack`` more generous than the rules are."""
    ordered = -np.sort(-logits, axis=-1)  # the largest first
    least = np.full(len(logits), -np.inf, np.float32)
    if 0 < rule.top_k <= logits.shape[-1]:
        least = ordered[:, rule.top_k - 1]
    weights = np.exp((ordered.astype(np.float64) - ordered[:, :1]) / rule.temperature)
    weights = np.where(ordered >= least[:, None], weights, 0.0)
    thresholds = [least]
    if rule.top_p < 1:
        mass = np.cumsum(weights, axis=-1) * (1 - slack)
        index = np.argmax(mass >= np.float32(rule.top_p) * weights.sum(-1, keepdims=True), axis=-1)
        thresholds.append(np.take_along_axis(ordered, index[:, None], axis=-1)[:, 0])
    if rule.min_p > 0:
        likely = weights * (1 + slack) >= np.float32(rule.min_p)
        thresholds.append(np.where(likely, ordered, np.inf).min(axis=-1))
    return np.max(thresholds, axis=0)


def assert_are_thresholds(found: Any, case: Case, arguments: tuple[jax.Array, ...]) -> None:
    """Entries of their rows, and those of sorting but for the rounding of sums."""
    logits, found = np.asarray(arguments[0]), np.asarray(found)
    for row, rule in enumerate(case.rules):
        low, high = (by_sorting(logits[row], rule, s) for s in (SUM_ROUNDING, -SUM_ROUNDING))
        own = found[row]
        assert ((low <= own) & (own <= high)).all(), (rule, low, own, high)
        assert (np.isneginf(own) | (logits[row] == own[:, None]).any(axis=-1)).all(), rule


# Without clusters, which the interpreter does not know.
run_interpreted = functools.partial(interpreted, truncation_threshold_mosaic, shares=1)


@pytest.mark.parametrize("case", [*SMALL_CASES, *LARGE_CASES[:2]], ids=str)
def test_the_reference_takes_what_sorting_takes(case: Case):
    arguments = make_arguments(case)
    assert_are_thresholds(run(*arguments), case, arguments)


@first_is_fast([*SMALL_CASES, LARGE_CASES[0]])
def test_interpreted_the_kernel_does_the_same(case: Case):
    arguments = make_arguments(case)
    assert_are_thresholds(run_interpreted(*arguments), case, arguments)


def test_interpreted_with_entries_that_registers_do_not_hold():
    case = Case("", 1024, MIXED, nodes=1)
    arguments = make_arguments(case)
    assert_are_thresholds(run_interpreted(*arguments, held=3), case, arguments)


def test_interpreted_it_ends_for_rows_without_an_answer():
    rules = (*MIXED, *EXTREME)
    broken = np.where(np.arange(256) == 7, np.nan, 0)
    rows = [np.full(256, value) for value in (np.nan, np.inf, -np.inf)] + [broken]
    case = Case("broken", 256, rules, nodes=len(rows))
    logits = jnp.asarray(np.tile(np.stack(rows).astype(np.float32), (len(rules), 1, 1)))
    assert run_interpreted(logits, *make_arguments(case)[1:]).shape == (len(rules), len(rows))


def test_a_row_of_nan_does_not_change_other_rows():
    case = Case("", 256, (Rule(top_k=3, top_p=0.9), Rule(top_k=3, top_p=0.9)))
    logits, *parameters = jax.device_get(make_arguments(case))
    spoiled = logits.copy()
    spoiled[0] = np.nan
    functions: Any = (run, run_interpreted)
    for function in functions:
        alone, beside = jax.device_get(
            [function(jnp.asarray(rows), *parameters) for rows in (logits, spoiled)]
        )
        np.testing.assert_array_equal(beside[1], alone[1])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in SMALL_CASES else pytest.mark.slow)
        for case in TEST_CASES
    ],
    ids=str,
)
def test_it_lowers_for_cuda(case: Case):
    lowered(truncation_threshold_mosaic, *jax.eval_shape(lambda: make_arguments(case)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, *BENCHMARK_CASES], ids=str)
def test_on_the_device_it_does_the_same(case: Case):
    arguments = make_arguments(case)
    function = jax.jit(truncation_threshold_mosaic)
    first = function(*arguments)
    assert_are_thresholds(first, case, arguments)
    for _ in range(20):
        np.testing.assert_array_equal(function(*arguments), first)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1024, 32_000, 128_256, 262_144])
def test_on_the_device_a_row_does_not_depend_on_others(size: int):
    case = Case("", size, (MIXED + EXTREME) * 3, nodes=3)
    arguments = make_arguments(case)
    together = KERNEL(*arguments)
    for row in range(0, len(case.rules), 5):
        own = [argument[row : row + 1] for argument in arguments]
        alone = KERNEL(own[0][:, :1], *own[1:])
        np.testing.assert_array_equal(alone[0, 0], together[row, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1024, 32_000, 128_256])
def test_on_the_device_it_ends_for_rows_without_an_answer(size: int):
    rules = (*MIXED, *EXTREME)
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        for first in (0, size // 2):
            case = Case("", size, rules, nodes=1)
            logits, *parameters = make_arguments(case)
            logits = jnp.where(jnp.arange(size) >= first, value, logits)
            jax.block_until_ready(KERNEL(logits, *parameters))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros((1, 1, 256), jnp.bfloat16), "bfloat16 logits"),
        (np.zeros((1, 1, 1000), np.float32), "rows of 1000"),
        (np.zeros((1, 1, 262_272), np.float32), "rows of 262272"),
    ],
)
def test_unsupported_arguments_are_named(logits: jax.Array, message: str):
    parameters = make_arguments(Case("", 128, (Rule(),)))[1:]
    with pytest.raises(ValueError, match=f"the kernel cannot take {message}"):
        KERNEL(logits, *parameters)


def test_digits_of_a_threshold_are_found_by_bits_as_by_nibbles():
    """A CPU searches bit by bit, other devices four bits at once: the same threshold."""

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def searched(logits: jax.Array, mass: jax.Array) -> list[jax.Array]:
        keys, weights = ordered_keys(logits), jax.nn.softmax(logits)
        return [search_digits(keys, weights, mass, digit_bits=bits) for bits in (1, 4)]

    logits = 3 * np.random.default_rng(0).standard_normal((2, 3, 777)).astype(np.float32)
    for mass in (1e-6, 0.1, 0.5, 0.9, 0.999, 2.0):
        by_bit, by_nibble = searched(logits, np.full((2, 3), mass, np.float32))
        np.testing.assert_array_equal(by_bit, by_nibble)


def test_one_outer_condition_guards_the_whole_search():
    arguments = jax.eval_shape(lambda: make_arguments(SMALL_CASES[0]))
    (call,) = jax.make_jaxpr(truncation_threshold)(*arguments).eqns
    jaxpr: Any = call.params["jaxpr"]
    conditions = [one for one in jaxpr.eqns if one.primitive.name == "cond"]
    assert len(conditions) == 1
    operands = [one.aval for one in conditions[0].invars if one.aval.ndim == 3]
    assert [one.shape for one in operands] == [arguments[0].shape], "the raw logits alone"
    sizes = [one.aval.size for eqn in jaxpr.eqns for one in eqn.outvars]
    assert max(sizes) < arguments[0].size, "nothing as large as they is made outside"
