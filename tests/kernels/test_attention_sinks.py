"""Attention with sinks, against a softmax over one more score."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.dense_attention import dense_causal_attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_arguments
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.paged_attention.partial import partial_attention
from pallas_kernels.paged_attention.parts import merge_partials, with_sinks
from pallas_kernels.paged_attention.tuning import AttentionTuning
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from tests.helpers.kernels import interpreted, lowered, relative_error, widened
from tests.helpers.marks import first_is_fast, slow

T, Q, G, D, K = 6, 4, 2, 8, 4
RNG = np.random.default_rng(0)
QUERIES: Any
QUERIES, SINKS = (RNG.standard_normal(s).astype(np.float32) for s in ((1, T, Q, D), (Q,)))
KEYS, VALUES = RNG.standard_normal((2, 1, T, G, D)).astype(np.float32)


def expected(window: int | None) -> np.ndarray:
    """Causal attention of T tokens to themselves: [1, T, Q, D]."""
    out = np.zeros(QUERIES.shape)
    for t in range(T):
        for head in range(Q):
            first = 0 if window is None else max(0, t - window + 1)
            keys, values = (x[0, first : t + 1, head // (Q // G)] for x in (KEYS, VALUES))
            scores = np.append(keys @ QUERIES[0, t, head] * D**-0.5, SINKS[head])
            weights = np.exp(scores - scores.max())
            out[0, t, head] = weights[:-1] @ values / weights.sum()
    return out


def pages(x: np.ndarray) -> jnp.ndarray:
    """The null page, then those of the T tokens: [3, G, K, D]."""
    padded = np.pad(x[0], ((K, 2 * K - T), (0, 0), (0, 0)))
    return jax.device_put(padded.reshape(3, K, G, D).swapaxes(1, 2))


LAYER = LayerPages(pages(KEYS), pages(VALUES))
TABLE, LENGTH, PLACES, LENGTHS = jax.device_put(
    (
        np.array([[1, 2]], np.int32),
        np.zeros(1, np.int32),
        np.arange(T, dtype=np.int32)[None],
        np.full(1, T, np.int32),
    )
)
CONTEXT = QueryContext(TABLE, LENGTH, PLACES, None, LENGTHS)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("order_invariant", [False, True])
def test_paged(window: int | None, order_invariant: bool):
    out = paged_attention(
        QUERIES,
        LAYER,
        CONTEXT,
        jnp.asarray(SINKS),
        options=AttentionOptions(window=window),
        order_invariant=order_invariant,
    )
    np.testing.assert_allclose(out, expected(window), atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_dense(window: int | None):
    q, k, v = map(jnp.asarray, (QUERIES, KEYS, VALUES))
    out = dense_causal_attention(q, k, v, window, sinks=jnp.asarray(SINKS))
    np.testing.assert_allclose(out, expected(window), atol=1e-5)


def test_in_parts():
    """Half of every page at a time; the sinks belong to one of them."""
    parts = []
    for first in (0, 2):
        part = LayerPages(*(x[:, :, first : first + 2] for x in (LAYER.k, LAYER.v)))
        parts.append(partial_attention(QUERIES, part, CONTEXT, first, page_size=K))
    parts[0] = with_sinks(parts[0], jnp.asarray(SINKS))
    out = merge_partials(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))
    np.testing.assert_allclose(out, expected(None), atol=1e-5)


# Heads as in gpt-oss: eight of 64 to a KV head.
KERNEL_CASES = (
    Case("plain", (130, 0, 63), 1, 16, 2, 64, 64),
    Case("window", (300, 5), 1, 16, 2, 64, 64, window=128),
    Case("tree in a window", (300, 70), 6, 16, 2, 64, 16, tree=True, window=128),
    Case("chunk", (10, 200), 80, 8, 1, 64, 64),
    Case("long", (9000,), 6, 16, 2, 64, 64, tree=True),
)
FAST_TO_INTERPRET = {"tree in a window"}


def sinks_of(case: Case) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(case.num_heads), jnp.float32)


def error_of(case: Case, found: Any, q: Any, pages: Any, context: Any) -> float:
    q, pages = jax.tree.map(widened, (q, pages))
    expected = paged_attention(q, pages, context, sinks_of(case), options=case.options)
    return relative_error(found, expected)


@pytest.mark.parametrize(
    "case",
    [case if case.name in FAST_TO_INTERPRET else slow(case) for case in KERNEL_CASES[:4]],
    ids=str,
)
def test_interpreted_the_kernel_has_them(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    how = {"options": case.options, "config": AttentionTuning(block=64, stages=2)}
    found = interpreted(paged_attention_mosaic, *arguments, sinks_of(case), **how)
    assert error_of(case, found, *arguments) < 4e-3


@first_is_fast(KERNEL_CASES, 1)
def test_the_kernel_lowers_with_them(case: Case):
    arguments = jax.eval_shape(lambda: (*make_arguments(case, jnp.bfloat16), sinks_of(case)))
    lowered(functools.partial(paged_attention_mosaic, options=case.options), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_on_the_device_the_kernel_has_them(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    attend = functools.partial(paged_attention_mosaic, options=case.options)
    found = attend(*arguments, sinks_of(case))
    assert error_of(case, found, *arguments) < 4e-3
    assert all(jnp.array_equal(found, attend(*arguments, sinks_of(case))) for _ in range(5))


def test_other_kernels_do_not_take_them():
    with pytest.raises(ValueError, match="the kernel cannot take attention sinks"):
        paged_attention(QUERIES, LAYER, CONTEXT, jnp.asarray(SINKS), implementation="mosaic_tpu")
    with pytest.raises(ValueError, match=r"sinks must be \(4,\)"):
        paged_attention(QUERIES, LAYER, CONTEXT, jnp.zeros(2))
