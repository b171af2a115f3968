"""The state of a convolution over trees and runs, against its definition token by token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import CommittedPath, Geometry
from jaxspec.cache.convolution import ConvolutionState
from jaxspec.decoding.trees.tree import unpack_mask
from jaxspec.parallel import WHOLE
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_trees import path_from_root, random_tree

ROWS, CHANNELS, TAPS, NODES, DEPTH = 3, 5, 4, 12, 5
WIDTH = 6  # tokens of a prompt that are read at once

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
read_run, read_tree = jit(ConvolutionState.read_run), jit(ConvolutionState.read_tree)
commit = jit(lambda state, path: ConvolutionState.commit([state], path, NO_KERNELS)[0])
unpack = jit(unpack_mask, static_argnames="size")


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def empty() -> ConvolutionState:
    shape = TAPS - 1, CHANNELS
    made = ConvolutionState.create(Geometry(1, 1, ROWS), CHANNELS, TAPS, WHOLE)
    assert made.inputs.shape == (ROWS, *shape) and not made.overwritable
    return jax.device_get(made)


def in_numpy(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The convolution of a row's inputs [T, C] in float64."""
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), inputs.astype(np.float64)])
    taps = [padded[i : i + len(inputs)] * weight[i].astype(np.float64) for i in range(TAPS)]
    return np.sum(taps, axis=0)


def after_prompts(
    rng: np.random.Generator, weight: np.ndarray, lens: list[int]
) -> tuple[ConvolutionState, list[np.ndarray]]:
    """Prompts of these lengths, read in pieces, and the inputs of each. Padding is NaN."""
    state, inputs = empty(), [normal(rng, size, CHANNELS) for size in lens]
    for start in range(0, max(lens), WIDTH):
        parts = [own[start : start + WIDTH] for own in inputs]
        tokens: Any = np.full((ROWS, WIDTH, CHANNELS), np.nan, np.float32)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        counts: Any = np.array([len(part) for part in parts], np.int32)
        out, state = read_run(state, np.arange(ROWS), counts, tokens, weight)
        for row, part in enumerate(parts):
            want = in_numpy(inputs[row], weight)[start : start + WIDTH]
            np.testing.assert_allclose(out[row, : len(part)], want, atol=1e-5)
    return state, inputs


def test_trees_read_their_own_paths_and_the_accepted_one_is_kept():
    """Of prompts shorter and longer than the convolution. Nodes of other branches are NaN."""
    rng = np.random.default_rng(0)
    weight = normal(rng, TAPS, CHANNELS)
    state, prompts = after_prompts(rng, weight, [1, 2, 14])
    tree = random_tree(rng, np.zeros(ROWS, int), [NODES, 7, 1], NODES, DEPTH)
    ancestors, nodes = unpack(tree.ancestors, size=NODES), normal(rng, ROWS, NODES, CHANNELS)
    rows, lasts = np.arange(ROWS), [NODES - 1, 6, 0]
    paths = [path_from_root(np.asarray(tree.parents[row]), last) for row, last in enumerate(lasts)]
    for row, path in enumerate(paths):
        nodes[row, np.setdiff1d(range(NODES), path)] = np.nan
    out, waiting = read_tree(state, rows, nodes, weight, ancestors, tree.depth)
    padded: Any = np.zeros((ROWS, DEPTH + 1), np.int32)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
        whole = np.concatenate([prompts[row], nodes[row, path]])
        want = in_numpy(whole, weight)[len(prompts[row]) :]
        np.testing.assert_allclose(np.asarray(out)[row, path], want, atol=1e-5)
    counts: Any = np.array([len(paths[0]), len(paths[1]), 0], np.int32)  # one row does not decode
    path = CommittedPath(
        rows=jnp.asarray(rows),
        page_table=jnp.zeros((ROWS, 1), int),
        context_lens=jnp.zeros(ROWS, int),
        path=padded,
        counts=counts,
        is_chain=False,
    )
    after = jax.device_get(commit(waiting, path))
    assert after.nodes is None
    for row, count in enumerate(counts):
        whole = np.concatenate([prompts[row], nodes[row, padded[row, :count]]])
        kept = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), whole])[1 - TAPS :]
        np.testing.assert_array_equal(after.inputs[row], kept.astype(np.float32))


def test_rows_are_cleared_copied_and_put_back():
    inputs: Any = normal(np.random.default_rng(1), ROWS, TAPS - 1, CHANNELS)
    state, none = jax.device_put(ConvolutionState(inputs=inputs)), np.zeros(0, np.int32)
    saved = state.take(none, np.array([2]))
    cleared = state.reset(np.array([2, 7]))
    assert not np.any(cleared.inputs[2]) and np.array_equal(cleared.inputs[:2], inputs[:2])
    back = cleared.put(saved, none, np.array([0]))
    np.testing.assert_array_equal(back.inputs[0], inputs[2])
    np.testing.assert_array_equal(back.inputs[1], inputs[1])
