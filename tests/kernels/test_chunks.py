"""Attention in chunks: which slots nodes of trees and tokens of prompts see."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import chunk_misfit, paged_attention
from pallas_kernels.paged_attention.reference import visible_slots
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext

CHUNK, SLOTS = 5, 60
RNG = np.random.default_rng(0)


def random_tree(nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, depths and ancestors of nodes, which come after their parents and are among their
    ancestors."""
    parents = np.array([-1, *(int(RNG.integers(max(0, i - 3), i)) for i in range(1, nodes))])
    depths, ancestors = np.zeros(nodes, int), np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
        ancestors[node] |= ancestors[parents[node]]
    return parents, depths, ancestors


@pytest.mark.parametrize("length", [0, 3, 4, 9, 12])
def test_nodes_of_a_tree_see_the_chunk_of_their_depth(length: int):
    """Trees that begin in a chunk and end in the next ones, of two words."""
    nodes = 40
    _, depths, ancestors = random_tree(nodes)
    assert depths.max() > 2 * CHUNK
    words = np.zeros((nodes, 2), np.uint32)
    for node, other in zip(*np.nonzero(ancestors), strict=True):
        words[node, other // 32] |= np.uint32(1 << (other % 32))
    context = QueryContext(
        jnp.zeros((1, SLOTS), jnp.int32),
        jnp.array([length]),
        jnp.asarray(length + depths)[None],
        jnp.asarray(words)[None],
        jnp.array([length + nodes]),
    )
    found = visible_slots(context, jnp.arange(SLOTS), AttentionOptions(chunk=CHUNK))[0]
    expected = np.zeros((nodes, SLOTS), bool)
    for node in range(nodes):
        first = (length + depths[node]) // CHUNK * CHUNK
        expected[node, first:length] = True
        for other in np.flatnonzero(ancestors[node]):
            expected[node, length + other] = length + depths[other] >= first
    np.testing.assert_array_equal(found, expected)


def test_tokens_of_a_prompt_see_their_chunk():
    length, tokens = 7, 12
    positions = length + jnp.arange(tokens)[None]
    context = QueryContext(jnp.zeros((1, SLOTS), jnp.int32), jnp.array([length]), positions)
    found = visible_slots(context, jnp.arange(SLOTS), AttentionOptions(chunk=CHUNK))[0]
    slot, position = np.arange(SLOTS), np.asarray(positions[0])[:, None]
    np.testing.assert_array_equal(found, (slot <= position) & (slot >= position // CHUNK * CHUNK))


def test_no_kernel_attends_in_chunks():
    """Asked for by name it is an error; else plain jax.numpy runs."""
    assert chunk_misfit(AttentionOptions(chunk=8)) == "attention in chunks of 8 positions"
    pages = LayerPages(*(jnp.ones((3, 1, 8, 128), jnp.bfloat16),) * 2)
    context = QueryContext(jnp.array([[1, 2]]), jnp.array([3]), jnp.array([[3]]))
    q = jnp.ones((1, 1, 2, 128), jnp.bfloat16)
    options = AttentionOptions(chunk=8)
    assert paged_attention(q, pages, context, options=options, implementation="auto").shape
    with pytest.raises(ValueError, match="cannot take attention in chunks of 8 positions"):
        paged_attention(q, pages, context, options=options, implementation="mosaic_gpu")
