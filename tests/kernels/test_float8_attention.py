"""Attention over 8-bit pages: the references, and the Hopper kernel interpreted, lowered, run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import decode
from pallas_kernels.paged_attention import misfit, misfit_tpu, paged_attention
from pallas_kernels.paged_attention.cases import (
    KERNEL_CASES,
    LONG_CASES,
    TEST_CASES,
    Case,
    make_arguments,
    parts_of,
    poisoned,
    with_float8_pages,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.paged_attention.partial import partial_attention
from pallas_kernels.paged_attention.parts import PartialAttention, merge_partials
from pallas_kernels.paged_attention.tuning import AttentionTuning
from pallas_kernels.pages import LayerPages
from tests.helpers.kernels import attention_error, interpreted, lowered
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

NAN = 0x7F  # a byte
ONE = AttentionTuning(block=64, stages=2, byte_stages=3)
TWO = dataclasses.replace(ONE, warpgroups=2)
# As float8_tuning has them for many sequences, and for long ones: case and configuration.
TUNED = (
    (
        Case("many", (70, 3, 0), 6, 8, 4, 128, 32, tree=True),
        AttentionTuning(block=64, stages=1, byte_stages=2, heads=2),
    ),
    (
        Case("long", (300, 140), 6, 4, 1, 128, 64, tree=True),
        AttentionTuning(block=128, stages=2, byte_stages=2),
    ),
)
LONGEST = Case("L: 8k", (8192, 8192), 6, 32, 8, 128, 64, tree=True)  # blocks of 128 slots
FAST = {"K: window under a tree"}
INTERPRETED = [
    *(slow(*one) for one in TUNED),
    *(
        pytest.param(case, config, marks=() if case.name in FAST else pytest.mark.slow)
        for case in KERNEL_CASES
        for config in [TWO if case.num_tokens > 16 else ONE]
    ),
]


def attend(case: Case, **options: Any) -> Any:
    function = functools.partial(paged_attention, options=case.options, **options)
    return jax.jit(function, compiler_options=FAST_COMPILE)


def float8_arguments(case: Case, dtype: Any = jnp.float32) -> Any:
    """NaN where no query sees a slot."""
    return poisoned(case, with_float8_pages(make_arguments(case, dtype)), NAN)


def wide_arguments(arguments: Any) -> Any:
    """The same keys and values in float32, and so the same attention."""
    q, pages, context = arguments
    wide = [
        jnp.nan_to_num(decode(x, jnp.float32)) * scale[:, None, None]
        for x, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    ]
    return q.astype(jnp.float32), LayerPages(*wide), context


@pytest.mark.parametrize("order_invariant", [False, slow(True)])
@first_is_fast([TEST_CASES[11], *TEST_CASES[:11], *TEST_CASES[12:]])
def test_bytes_are_numbers_times_their_scales(case: Case, order_invariant: bool):
    arguments = float8_arguments(case)
    run = attend(case, order_invariant=order_invariant)
    np.testing.assert_allclose(
        run(*arguments), run(*wide_arguments(arguments)), atol=2e-5, rtol=2e-5
    )


@first_is_fast([case for case in TEST_CASES if case.page_size % 2 == 0][2:])
def test_merged_parts_are_the_whole_softmax(case: Case):
    """The two halves of every page."""
    arguments: Any = float8_arguments(case)
    run: Any = functools.partial(partial_attention, options=case.options, page_size=case.page_size)
    parts = [run(*part) for part in parts_of(arguments, 2)]
    found = merge_partials(PartialAttention(*map(jnp.stack, zip(*parts, strict=True))))
    np.testing.assert_allclose(found, attend(case)(*arguments), atol=2e-5, rtol=2e-5)


def error(case: Case, found: Any, arguments: Any) -> float:
    """Relative, against the reference in float32."""
    return attention_error(case, found, wide_arguments(arguments))


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=lambda one: getattr(one, "name", ""))
def test_interpreted_the_kernel_is_the_reference(case: Case, config: AttentionTuning):
    arguments = float8_arguments(case, jnp.bfloat16)
    how: Any = {"options": case.options, "config": config, "detect_races": True}
    found = interpreted(paged_attention_mosaic, *arguments, **how)
    assert error(case, found, arguments) < 4e-3


@first_is_fast([LONGEST, *LONG_CASES, *KERNEL_CASES])
def test_parts_lower_for_cuda(case: Case):
    """Blocks and partial sums fit the shared memory."""
    made = jax.eval_shape(lambda: with_float8_pages(make_arguments(case, jnp.bfloat16)))
    for part in jax.eval_shape(functools.partial(parts_of, count=2), made):
        run: Any = functools.partial(
            partial_attention, options=case.options, page_size=case.page_size
        )
        lowered(functools.partial(run, implementation="mosaic_gpu"), *part)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LONGEST, *LONG_CASES, *KERNEL_CASES[:3]], ids=str)
def test_on_the_device_merged_parts_are_the_reference(case: Case):
    run: Any = functools.partial(partial_attention, options=case.options, page_size=case.page_size)
    run = jax.jit(functools.partial(run, implementation="mosaic_gpu"))
    arguments = float8_arguments(case, jnp.bfloat16)
    parts = [run(*part) for part in parts_of(arguments, 2)]
    found = merge_partials(PartialAttention(*map(jnp.stack, zip(*parts, strict=True))))
    assert error(case, found, arguments) < 4e-3


@first_is_fast([LONGEST, *KERNEL_CASES[::-1], *LONG_CASES], 3)
def test_it_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: with_float8_pages(make_arguments(case, jnp.bfloat16)))
    how: Any = {"options": case.options, "implementation": "mosaic_gpu"}
    lowered(functools.partial(paged_attention, **how), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 2, 8])
@pytest.mark.parametrize("case", [*KERNEL_CASES, *LONG_CASES, LONGEST], ids=str)
def test_on_the_device_it_is_the_reference(case: Case, splits: int | None):
    arguments, config = float8_arguments(case, jnp.bfloat16), None
    if splits is not None:
        config = TWO if case.num_tokens > 16 else ONE
        config = dataclasses.replace(config, splits=splits)
    run = jax.jit(functools.partial(paged_attention_mosaic, options=case.options, config=config))
    for _ in range(3):
        assert error(case, run(*arguments), arguments) < 4e-3


@pytest.mark.parametrize(
    ("dtype", "message"), [(jnp.float32, "float32 queries"), (jnp.bfloat16, None)], ids=str
)
def test_the_kernel_takes_bytes_with_bfloat16_queries(dtype: Any, message: str | None):
    q, (k_pages, v_pages, *_), _ = float8_arguments(KERNEL_CASES[0], dtype)
    found = misfit(q, k_pages, v_pages, order_invariant=False)
    assert found is None if message is None else message in str(found)
    assert "uint8" in str(misfit_tpu(q, k_pages, v_pages, jnp.zeros((1, 1)), False))


def test_pages_and_scales_must_fit():
    q, pages, context = float8_arguments(TEST_CASES[0])
    _, wide, _ = make_arguments(TEST_CASES[0])
    with pytest.raises(ValueError, match="pages of uint8 without a scale"):
        paged_attention(q, pages._replace(k_scale=None, v_scale=None), context)
    with pytest.raises(ValueError, match="pages of float32 with a scale"):
        paged_attention(q, pages._replace(k=wide.k, v=wide.v), context)
    with pytest.raises(ValueError, match=r"scales \(1,\) do not fit pages"):
        paged_attention(q, pages._replace(k_scale=pages.k_scale[:1]), context)
