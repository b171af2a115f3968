"""The TPU kernel of paged attention, interpreted. It has never run on a TPU.

tests/compiled/test_compiled_for_tpu.py compiles it.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import misfit_tpu, paged_attention
from pallas_kernels.paged_attention.cases import (
    KERNEL_CASES,
    LONG_CASES,
    TEST_CASES,
    Case,
    make_arguments,
    poisoned,
)
from pallas_kernels.paged_attention.mosaic_tpu import paged_attention_mosaic
from pallas_kernels.pages import AttentionOptions
from tests.helpers.kernels import attention_error, run_reference
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE

# The others take some seconds each.
FAST = {"window under a tree"}
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
    for case in (*TEST_CASES, *KERNEL_CASES, *LONG_CASES)
]


def attend(case: Case, arguments: Any, interpret: Any = True) -> np.ndarray:
    found = paged_attention_mosaic(*arguments, options=case.options, interpret=interpret)
    return np.asarray(found)


def named(name: str) -> Case:
    return next(case for case in (*TEST_CASES, *KERNEL_CASES) if case.name == name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
@pytest.mark.parametrize("case", CASES)
def test_interpreted_it_is_the_reference(case: Case, dtype: Any):
    """Slots that no query sees hold NaN or infinity."""
    arguments = make_arguments(case, dtype)
    if dtype == jnp.bfloat16:
        found = attend(case, poisoned(case, arguments, np.nan))
        assert attention_error(case, found, arguments) < 4e-3
    else:
        found = attend(case, poisoned(case, arguments, np.inf))
        expected = run_reference(*arguments, options=case.options)
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(named(name), id=name, marks=pytest.mark.slow)
        for name in ("empty and one-token contexts", "K: two tiles", "K: window", "first slot")
    ],
)
def test_no_copy_is_read_before_it_has_ended(case: Case):
    """The TPU interpreter makes copies when they are waited for, and fills memory with NaN."""
    arguments = make_arguments(case)
    careful = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
    expected = run_reference(*arguments, options=case.options)
    found = jax.block_until_ready(attend(case, arguments, careful))
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_sequence_may_end_before_its_context():
    case = TEST_CASES[1]
    *q_and_pages, context = make_arguments(case)
    arguments = (*q_and_pages, context._replace(kv_lens=np.array([0, 0, 5], np.int32)))
    found = attend(case, poisoned(case, arguments, np.nan))
    assert np.isfinite(found).all()
    expected = run_reference(*arguments, options=case.options)
    np.testing.assert_allclose(found[2], expected[2], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (TEST_CASES[0], jnp.bfloat16, "heads of 16"),
        (KERNEL_CASES[0], jnp.float16, "all must be bfloat16, or all float32"),
        (Case("", (9,), 1, 2, 1, 64, 8), jnp.bfloat16, "pages of 8 slots: a multiple of 16"),
        (Case("", (9,), 1, 2, 1, 64, 4), jnp.float32, "pages of 4 slots: a multiple of 8"),
    ],
    ids=["head", "dtype", "page", "page of float32"],
)
def test_unsupported_arguments_are_named(case: Case, dtype, message: str):
    q, pages, context = arguments = make_arguments(case, dtype)
    problem = misfit_tpu(q, pages.k, pages.v, context.page_table, order_invariant=False)
    assert message in str(problem)
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        paged_attention(*arguments, implementation="mosaic_tpu")
    auto = functools.partial(paged_attention, implementation="auto_tpu")
    found = jax.jit(auto, compiler_options=FAST_COMPILE)(*arguments)
    assert np.isfinite(np.asarray(found)).all(), "the reference takes it"


def test_a_soft_cap_is_left_to_the_reference():
    case = KERNEL_CASES[4]
    arguments = make_arguments(case, jnp.bfloat16)
    attend = functools.partial(paged_attention, *arguments, options=AttentionOptions(softcap=5.0))
    with pytest.raises(ValueError, match="cannot take scores with a soft cap of 5"):
        attend(implementation="mosaic_tpu")
    auto = jax.jit(functools.partial(attend, implementation="auto_tpu"))()
    np.testing.assert_array_equal(auto, jax.jit(attend)())


def test_it_takes_what_the_programs_have():
    for case in (KERNEL_CASES[0], KERNEL_CASES[3]):
        for dtype in (jnp.bfloat16, jnp.float32):
            q, pages, context = make_arguments(case, dtype)
            arrays = q, pages.k, pages.v, context.page_table
            assert misfit_tpu(*arrays, order_invariant=False) is None
            assert "on the order" in str(misfit_tpu(*arrays, order_invariant=True))


def test_what_does_not_fit_in_its_memory_is_named():
    def why_not(table: tuple[int, int], page_size: int) -> str | None:
        q: Any = jax.ShapeDtypeStruct((8, 1, 32, 128), jnp.bfloat16)
        pages: Any = jax.ShapeDtypeStruct((4, 32, page_size, 128), jnp.bfloat16)
        indices: Any = jax.ShapeDtypeStruct(table, jnp.int32)
        return misfit_tpu(q, pages, pages, indices, order_invariant=False)

    assert why_not((64, 2048), 128) is None
    assert why_not((64, 2049), 128) == "page tables of (64, 2049): at most 131072 entries"
    assert why_not((64, 2048), 256) == "pages of 2097152 bytes: at most 1048576"
