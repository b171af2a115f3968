"""Attention over wide page tables on a CPU: block by block, up to the longest context."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_arguments
from pallas_kernels.paged_attention.parts import BLOCK, LONG
from pallas_kernels.pages import AttentionOptions
from tests.helpers.kernels import attention_error, run_reference, widened

WIDE: Any = {"num_heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 16, "num_columns": 80}
CASES = [
    Case("short", (3, 40), num_tokens=1, **WIDE),
    Case("a tree", (700, 255, 9), num_tokens=9, tree=True, **WIDE),
    Case("a chunk", (600, 0), num_tokens=40, **WIDE),
    Case("a window", (1000, 300), num_tokens=4, window=50, **WIDE),
    Case("first slot", (520, 20), num_tokens=3, first_slot=7, **WIDE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference(case: Case):
    assert case.columns * case.page_size >= LONG > BLOCK
    arguments = jax.tree.map(widened, make_arguments(case))
    found = jax.jit(lambda *each: paged_attention(*each, options=case.options))(*arguments)
    assert attention_error(case, found, arguments) < 2e-6


def test_caps_and_sinks():
    case = Case("all", (700, 30), num_tokens=2, **WIDE)
    q, pages, context = jax.tree.map(widened, make_arguments(case))
    sinks = jnp.linspace(-1.0, 2.0, case.num_heads)
    for each in (AttentionOptions(softcap=2.0), AttentionOptions(scale=0.3)):
        found = paged_attention(q, pages, context, sinks, options=each)
        exact = paged_attention(q, pages, context, sinks, options=each, order_invariant=True)
        np.testing.assert_allclose(found, exact, atol=2e-6)


def test_its_work_ends_with_the_longest_context():
    """The program loops: no array has as many slots as the table."""
    case = dataclasses.replace(CASES[0], num_columns=2048)
    arguments = jax.tree.map(widened, make_arguments(case))
    function = jax.jit(lambda *each: paged_attention(*each, options=case.options))
    text = function.lower(*arguments).compile().as_text()
    shapes = re.findall(r"\w+\[([\d,]+)\]", text or "")
    assert "while" in (text or "") and str(2048 * case.page_size) not in ",".join(shapes).split(",")


def test_the_gradient_is_that_of_the_reference():
    case = Case("gradient", (600, 30), num_tokens=2, **WIDE)
    q, *others = jax.tree.map(widened, make_arguments(case))

    def gradient(function: Callable[..., jax.Array]) -> jax.Array:
        loss = lambda q: (function(q, *others, options=case.options) ** 2).sum()  # noqa: E731
        return jax.grad(loss)(jnp.asarray(q))

    np.testing.assert_allclose(gradient(paged_attention), gradient(run_reference), atol=1e-5)
