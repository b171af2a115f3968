"""Attention with the keys and values of every head, beside attention over what they came from."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels.latent_attention.expanded import dense_heads, expanded_attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from tests.helpers.marks import slow

HEADS, LATENT, ROTARY, KEYS, VALUES, SCALE = 3, 20, 4, 6, 5, 0.3
CONTEXTS, TOKENS = (0, 7, 22), 9


def context_of(*arrays: Any) -> QueryContext:
    """A context without a mask, of a table, lengths, positions and ends."""
    table, lens, positions, ends = (jnp.asarray(x, jnp.int32) for x in arrays)
    return QueryContext(table, lens, positions, None, ends)


def arrays(page_size: int, num_tokens: int, dtype: Any = jnp.float32) -> Any:
    """Arguments of expanded_attention: pages in a random order, NaN where no query sees."""
    rng, batch = np.random.default_rng(0), len(CONTEXTS)
    columns = -(-(max(CONTEXTS) + num_tokens) // page_size) + 1
    table = 1 + rng.permutation(batch * columns).reshape(batch, columns)
    pages = rng.standard_normal((1 + batch * columns, 1, page_size, LATENT + ROTARY))
    lens = np.array(CONTEXTS)
    kv_lens = lens + np.array([num_tokens, num_tokens - 2, num_tokens])
    slots = np.arange(columns * page_size).reshape(columns, page_size)
    own = np.arange(batch)[:, None, None], slots // page_size
    unseen = slots >= kv_lens[:, None, None]  # [B, M, K]
    pages[table[own], 0, slots % page_size] += np.where(unseen, np.nan, 0)[..., None]
    pages[0] = np.nan

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return (
        normal(batch, num_tokens, HEADS, KEYS + ROTARY),
        jnp.asarray(pages, dtype),
        normal(HEADS, KEYS, LATENT),
        normal(HEADS, VALUES, LATENT),
        context_of(table, lens, lens[:, None] + np.arange(num_tokens), kv_lens),
    )


@functools.partial(jax.jit, static_argnames="first_slot")
def absorbed(
    q: Array, pages: Array, key_up: Array, value_up: Array, context: QueryContext, first_slot=0
):
    """Attention to latents, with products of the queries and of what they attended to."""
    plain, rotary = jnp.split(q, [KEYS], axis=-1)
    queries = jnp.concatenate([jnp.einsum("btqk,qkl->btql", plain, key_up), rotary], -1)
    options = AttentionOptions(scale=SCALE, first_slot=first_slot)
    out = paged_attention(queries, LayerPages(pages, pages), context, options=options)
    return jnp.einsum("btql,qvl->btqv", out[..., :LATENT], value_up)


@pytest.mark.parametrize(("page_size", "block"), [(3, None), (7, 1), slow(1, 10), slow(7, 20)])
def test_it_is_attention_to_latents(page_size: int, block: int | None):
    arguments = arrays(page_size, TOKENS)
    found = expanded_attention(*arguments, scale=SCALE, block=block)
    assert found.shape == (len(CONTEXTS), TOKENS, HEADS, VALUES)
    expected = absorbed(*arguments)
    real = np.arange(TOKENS) < np.array([TOKENS, TOKENS - 2, TOKENS])[:, None]
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
    assert np.isfinite(found).all()


def test_first_slots_are_hidden():
    arguments = arrays(4, 5)
    found = expanded_attention(*arguments, scale=SCALE, first_slot=1, block=8)
    expected = absorbed(*arguments, first_slot=1)
    np.testing.assert_allclose(found[1:, :3], expected[1:, :3], atol=1e-5)
    assert np.isfinite(found).all()  # the first query of the first sequence sees nothing


def test_in_bfloat16_it_is_as_near_as_rounding():
    arguments = arrays(3, TOKENS, jnp.bfloat16)
    found = expanded_attention(*arguments, scale=SCALE, block=6)
    assert found.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, arguments)
    expected = np.asarray(absorbed(*wide))[[0, 2]]
    error = np.abs(np.asarray(found, np.float32)[[0, 2]] - expected).max()
    assert error < 0.05 * np.abs(expected).max()


def test_memory_is_that_of_a_block():
    """Of 4,096 slots; the scores of all would take 64 MiB."""
    batch, columns, size = 1, 64, 64
    struct: Any = jax.ShapeDtypeStruct
    arguments = (
        struct((batch, 256, 16, KEYS + ROTARY), jnp.float32),
        struct((1 + columns, 1, size, LATENT + ROTARY), jnp.float32),
        struct((16, KEYS, LATENT), jnp.float32),
        struct((16, VALUES, LATENT), jnp.float32),
        QueryContext(
            struct((1, columns), jnp.int32),
            struct((1,), jnp.int32),
            struct((1, 256), jnp.int32),
            None,
            struct((1,), jnp.int32),
        ),
    )

    def temporaries(block: int) -> int:
        lowered = expanded_attention.lower(*arguments, scale=SCALE, block=block)
        analysis: Any = lowered.compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(128) < 16 << 20 < 64 << 20 < temporaries(4096)


def test_dense_heads_are_projections():
    rng = np.random.default_rng(0)
    stored = jnp.asarray(rng.standard_normal((2, 5, LATENT + ROTARY)), jnp.float32)
    key_up, value_up = (
        jnp.asarray(rng.standard_normal((HEADS, size, LATENT)), jnp.float32)
        for size in (KEYS, VALUES)
    )
    keys, values = dense_heads(stored, key_up, value_up)
    latent, rotary = np.split(np.asarray(stored), [LATENT], axis=-1)
    np.testing.assert_allclose(keys[..., :KEYS], np.einsum("btl,qdl->btqd", latent, key_up), 1e-4)
    np.testing.assert_array_equal(keys[:, :, 1, KEYS:], rotary)
    np.testing.assert_allclose(values, np.einsum("btl,qvl->btqv", latent, value_up), 1e-4)
