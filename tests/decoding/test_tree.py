"""Draft trees: packed masks, ancestors, and what make_tree, make_chain and pad_tree promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.decoding.trees.tree import (
    DraftTree,
    make_chain,
    make_tree,
    pack_mask,
    pad_tree,
    path_to,
    root_only,
    unpack_mask,
)
from pallas_kernels.paged_attention.cases import random_parents
from tests.helpers.marks import slow
from tests.helpers.random_trees import path_from_root

WIDTH, MAX_DEPTH = 70, 12
jit_make_tree = jax.jit(functools.partial(make_tree, max_depth=MAX_DEPTH))
jit_path_to = jax.jit(path_to)

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, WIDTH)


def noisy_rows(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and parents [WIDTH] of a random tree, followed by noise."""
    rng = np.random.default_rng(seed)
    parents = rng.integers(-3, WIDTH, WIDTH)
    parents[:size] = random_parents(rng, size, MAX_DEPTH)
    return rng.integers(1, 99, WIDTH), parents


def built(tokens: np.ndarray, parents: np.ndarray, size: int) -> DraftTree:
    """The tree of some rows, on the host: slices of device arrays would compile one by one."""
    return jax.device_get(jit_make_tree(tokens[None], parents[None], np.array([size])))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 70])
def test_unpack_inverts_pack(size: int):
    mask = np.random.default_rng(size).random((2, 3, size)) < 0.5
    words = pack_mask(jnp.asarray(mask))
    assert words.shape == (2, 3, -(-size // 32)) and words.dtype == jnp.uint32
    assert np.array_equal(unpack_mask(words, size), mask)


def test_node_i_is_bit_i_mod_32_of_word_i_div_32():
    words = np.asarray(pack_mask(jnp.eye(WIDTH, dtype=bool)))
    for node in range(WIDTH):
        expected = np.zeros(3, np.uint32)
        expected[node // 32] = np.uint32(1) << np.uint32(node % 32)
        assert np.array_equal(words[node], expected)


@given(seed=seeds, size=sizes)
@settings(deadline=None, max_examples=50)
def test_ancestors_and_depth_are_those_of_the_parents(seed: int, size: int):
    tokens, parents = noisy_rows(seed, size)
    tree = built(tokens, parents, size)
    mask = np.asarray(unpack_mask(tree.ancestors, WIDTH))[0]
    for node in range(size):
        path = path_from_root(parents, node)
        assert np.flatnonzero(mask[node]).tolist() == sorted(path)
        assert tree.depth[0, node] == len(path) - 1


@given(seed=seeds, size=sizes)
@settings(deadline=None, max_examples=50)
def test_padding_is_told_apart_and_nodes_are_kept(seed: int, size: int):
    tokens, parents = noisy_rows(seed, size)
    tree = built(tokens, parents, size)
    assert tree.num_nodes.tolist() == [size]
    assert np.array_equal(tree.tokens[0, :size], tokens[:size])
    assert np.array_equal(tree.parents[0, :size], parents[:size])
    assert (tree.tokens[0, size:] == tokens[0]).all(), "padding repeats the root"
    assert (tree.parents[0, size:] == -1).all()
    assert not tree.depth[0, size:].any()
    seen_by_others = np.asarray(unpack_mask(tree.ancestors, WIDTH))[0, :size, size:]
    assert not seen_by_others.any(), "padding is nobody's ancestor"


@given(seed=seeds, size=sizes, data=st.data())
@settings(deadline=None, max_examples=50)
def test_path_to_lists_the_nodes_from_the_root(seed: int, size: int, data: st.DataObject):
    tokens, parents = noisy_rows(seed, size)
    leaf = data.draw(st.integers(0, size - 1))
    path, depth = jit_path_to(built(tokens, parents, size), jnp.array([leaf]))
    expected = path_from_root(parents, leaf)
    assert depth.tolist() == [len(expected) - 1]
    assert path[0].tolist() == expected + [0] * (MAX_DEPTH + 1 - len(expected))


def test_a_chain_is_the_tree_of_parent_i_minus_1():
    tokens = jnp.arange(12).reshape(2, 6)
    chain = make_chain(tokens, jnp.array([6, 4]))
    assert chain.is_chain and chain.max_depth == 5
    assert chain.parents.tolist() == [[-1, 0, 1, 2, 3, 4], [-1, 0, 1, 2, -1, -1]]
    assert chain.depth.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 0]]
    assert chain.ancestors[0, :, 0].tolist() == [1, 3, 7, 15, 31, 63]


def test_plain_decoding_is_a_tree_of_one_node():
    tree = root_only(jnp.array([5, 7]))
    assert tree.tokens.tolist() == [[5], [7]] and tree.max_depth == 0
    assert tree.ancestors.tolist() == [[[1]], [[1]]]


@pytest.mark.parametrize("width", [slow(32), 33, slow(64)])
def test_padding_adds_nothing_to_a_tree(width: int):
    rng = np.random.default_rng(0)
    parents = jnp.asarray(random_parents(rng, 32, 6)[None])
    probs = jnp.asarray(rng.random((1, 32, 5)), jnp.float32)
    tree = make_tree(jnp.arange(32)[None], parents, jnp.array([30]), 6, probs=probs)
    padded = pad_tree(tree, width)
    assert padded.num_nodes.tolist() == [30]
    assert (padded.max_depth, padded.is_chain) == (tree.max_depth, tree.is_chain)
    for name in ("tokens", "parents", "depth", "probs"):
        assert jnp.array_equal(getattr(padded, name)[:, :32], getattr(tree, name)), name
    mask = unpack_mask(padded.ancestors, width)
    assert jnp.array_equal(mask[:, :32, :32], unpack_mask(tree.ancestors, 32))
    assert not mask[:, :32, 32:].any()


def test_a_tree_cannot_be_padded_to_less_than_it_has():
    with pytest.raises(ValueError, match="cannot be padded to 2"):
        pad_tree(make_chain(jnp.arange(3)[None], jnp.array([3])), 2)
