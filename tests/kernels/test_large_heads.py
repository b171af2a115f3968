"""The Hopper kernel of paged attention with heads of 256, and with soft caps: interpreted, lowered,
and (with `-m gpu`) run. tests/kernels/test_paged_attention_kernel.py has narrower heads."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import (
    Case,
    make_arguments,
    parts_of,
    poisoned,
    with_float8_pages,
)
from pallas_kernels.paged_attention.large_head_cases import BENCHMARK_CASES, LONG_CASES, TEST_CASES
from pallas_kernels.paged_attention.mosaic_gpu import (
    paged_attention_mosaic,
    partial_attention_mosaic,
)
from pallas_kernels.paged_attention.output import _merged_rows
from pallas_kernels.paged_attention.queries import CHUNK, chunk_places
from pallas_kernels.paged_attention.tuning import ROWS, AttentionTuning
from pallas_kernels.shared_memory import STORE
from tests.helpers.kernels import attention_error, interpreted, lowered
from tests.helpers.marks import first_is_fast, slow
from tests.kernels.test_float8_attention import error as float8_error
from tests.kernels.test_float8_attention import float8_arguments
from tests.kernels.test_float8_widening import swizzled
from tests.kernels.test_partial_attention import check

ONE = AttentionTuning(block=64, stages=2)
TWO = dataclasses.replace(ONE, warpgroups=2, registers=240)
CONFIGS = {
    "tuned": None,
    "one warpgroup": ONE,
    "two warpgroups": TWO,
    "ping-pong": dataclasses.replace(TWO, ping_pong=True),
    "two splits": dataclasses.replace(ONE, splits=2),
    "eight splits": dataclasses.replace(ONE, splits=8),
    "eight splits of two warpgroups": dataclasses.replace(TWO, splits=8),
    "three parts": dataclasses.replace(ONE, parts=3),
    "three parts of two warpgroups": dataclasses.replace(TWO, parts=3),
}
FLOAT8 = AttentionTuning(block=64, stages=2, byte_stages=2)
# Heads of 64 and of 128 under a soft cap.
CAPPED = (
    Case("C: a tree", (70, 130), 6, 8, 2, 128, 16, tree=True, softcap=1.5),
    Case("C: two tiles, window", (10, 200), 20, 8, 2, 64, 64, window=30, softcap=1.5),
)


QUICK = Case("a small tree", (70,), 3, 2, 1, 256, 16, tree=True, softcap=1.5, window=40)


@first_is_fast([QUICK, *TEST_CASES, *CAPPED])
def test_interpreted_it_is_the_reference(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    spoiled = poisoned(case, arguments, np.inf if case.real_tokens else np.nan)
    config = TWO if case.num_tokens > 16 else ONE
    if case.head_dim < 256:
        config = dataclasses.replace(config, registers=None)
    found = interpreted(paged_attention_mosaic, *spoiled, options=case.options, config=config)
    assert attention_error(case, found, arguments) < 4e-3


@first_is_fast([TEST_CASES[6], TEST_CASES[2], TEST_CASES[5], TEST_CASES[9], CAPPED[0]], 0)
def test_interpreted_parts_of_contexts_are_merged(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    config = dataclasses.replace(TWO if case.num_tokens > 16 else ONE, parts=3, registers=None)
    spoiled = poisoned(case, arguments, np.nan)
    found = interpreted(paged_attention_mosaic, *spoiled, options=case.options, config=config)
    assert attention_error(case, found, arguments) < 4e-3


@first_is_fast([TEST_CASES[6], *TEST_CASES[:4], *CAPPED], 0)
def test_interpreted_pages_of_bytes_are_numbers(case: Case):
    arguments = float8_arguments(case, jnp.bfloat16)
    how: Any = {"options": case.options, "config": FLOAT8, "detect_races": True}
    found = interpreted(paged_attention_mosaic, *arguments, **how)
    assert float8_error(case, found, arguments) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", [TEST_CASES[2], TEST_CASES[5], TEST_CASES[7]], ids=str)
def test_interpreted_parts_are_those_of_the_reference(case: Case):
    check(case, 2, functools.partial(interpreted, partial_attention_mosaic, config=ONE))


def test_threads_store_rows_of_queries_where_tensor_cores_read_them():
    rows = np.random.default_rng(0).standard_normal((ROWS, 256)).astype(jnp.bfloat16)
    row, column, place = (
        np.stack(part) for part in zip(*chunk_places(np.arange(128), 256), strict=True)
    )
    found = np.zeros((rows.size // CHUNK, CHUNK), jnp.bfloat16)
    found[place // STORE] = rows.reshape(ROWS, -1, CHUNK)[row, column]
    assert sorted(place.reshape(-1)) == list(range(0, rows.nbytes, STORE))
    assert np.array_equal(found.reshape(-1).view(np.uint8), swizzled(rows, 64))
    banks = place.reshape(-1, 8) // STORE % 8  # eight threads store at once
    assert all(len(set(own)) == 8 for own in banks)


def test_a_soft_cap_changes_scores():
    q, pages, context = make_arguments(CAPPED[0], jnp.bfloat16)
    capped, plain = (
        attention_error(dataclasses.replace(CAPPED[0], softcap=cap), found, (q, pages, context))
        for found in [paged_attention(q, pages, context, options=CAPPED[0].options)]
        for cap in (1.5, None)
    )
    assert capped < 4e-3 < 0.02 < plain


@pytest.mark.parametrize("name", ["tuned", *map(slow, CONFIGS.keys() - {"tuned"})])
@first_is_fast([TEST_CASES[8], *TEST_CASES[:8], *BENCHMARK_CASES])
def test_it_lowers_for_cuda(case: Case, name: str):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    how = {"options": case.options, "config": CONFIGS[name]}
    lowered(functools.partial(paged_attention_mosaic, **how), *arguments)


@first_is_fast([*LONG_CASES, *TEST_CASES], 0)
def test_bytes_lower_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: with_float8_pages(make_arguments(case, jnp.bfloat16)))
    lowered(functools.partial(paged_attention_mosaic, options=case.options), *arguments)


@first_is_fast([*LONG_CASES, *TEST_CASES], 0)
def test_parts_lower_for_cuda(case: Case):
    shapes = jax.eval_shape(lambda: parts_of(make_arguments(case, jnp.bfloat16), 2)[1])
    how = {"options": case.options, "page_size": case.page_size}
    lowered(functools.partial(partial_attention_mosaic, **how), *shapes)


def test_threads_store_as_many_entries_as_jax_can():
    """Of 12 rows jax 0.11 could not store a thread's 3 entries of 32 columns: those of a chain of
    5, four heads a group, whose context two thread blocks share."""
    plan: Any = SimpleNamespace(large=True, log_sum_columns=32)
    for rows in range(1, 65):
        merged = _merged_rows(plan, rows)
        assert rows <= merged <= min(64, max(4, 2 * rows))
        assert merged * 32 // 128 in (1, 2, 4, 8, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", [*TEST_CASES, *CAPPED, *LONG_CASES], ids=str)
def test_on_the_device_it_is_the_reference(case: Case, name: str):
    arguments = make_arguments(case, jnp.bfloat16)
    function = functools.partial(paged_attention_mosaic, options=case.options, config=CONFIGS[name])
    found = function(*arguments)
    assert attention_error(case, found, arguments) < 4e-3
    assert all(jnp.array_equal(found, function(*arguments)) for _ in range(5)), "a race"
    for poison in (np.nan, np.inf):
        spoiled = poisoned(case, arguments, poison)
        for _ in range(3):
            np.testing.assert_array_equal(function(*spoiled), found)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 2, 8])
@pytest.mark.parametrize("case", [*TEST_CASES, *CAPPED, *LONG_CASES], ids=str)
def test_on_the_device_pages_of_bytes_are_numbers(case: Case, splits: int | None):
    arguments = float8_arguments(case, jnp.bfloat16)
    config = None if splits is None else dataclasses.replace(FLOAT8, splits=splits)
    run = functools.partial(paged_attention_mosaic, options=case.options, config=config)
    for _ in range(3):
        assert float8_error(case, run(*arguments), arguments) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, *LONG_CASES], ids=str)
def test_on_the_device_parts_are_those_of_the_reference(case: Case):
    check(case, 2, partial_attention_mosaic)
