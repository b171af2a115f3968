"""A delta rule with decays of channels, over trees, in chunks and as whole sequences, against the
definition in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Geometry
from jaxspec.cache.channel_decay import LONGEST_CHUNK, ChannelInputs
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.parallel import WHOLE
from tests.cache.test_delta_rule import commit, committed, jit, unpack
from tests.helpers.marks import slow
from tests.helpers.random_trees import path_from_root, random_tree

GROUPS, D, TAPS, FOLDED, NODES, DEPTH = 2, 6, 2, 8, 20, 6
TOLERANCE = 1e-5

read_tree, read_run = jit(DeltaState.read_tree), jit(DeltaState.read_run)


def random_inputs(rng: np.random.Generator, batch: int, size: int) -> tuple[Any, ChannelInputs]:
    """Queries and inputs as layers have them. Some channels forget in a token, some hardly at
    all."""
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    rates = np.array([0.01, 0.1, 1, 8, 0.5, 30], np.float32)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays: dict[str, Any] = {
        "k": unit(normal((batch, size, GROUPS, D))),
        "v": normal((batch, size, GROUPS, 1, D)),
        "g": -rng.exponential(1, (batch, size, GROUPS, D)).astype(np.float32) * rates,
        "beta": rng.random((batch, size, GROUPS, 1), np.float32),
    }
    return unit(normal((batch, size, GROUPS, D))), ChannelInputs(**arrays)


def in_numpy(q: Any, inputs: ChannelInputs) -> np.ndarray:
    """Outputs [T, G, 1, D] of a row's tokens, from an empty state."""
    s, out = np.zeros((GROUPS, D, D)), []
    for t in range(len(q)):
        token = jax.tree.map(lambda x, t=t: x[t].astype(np.float64), inputs)
        s = np.exp(token.g)[..., None] * s
        written = token.beta * (token.v[:, 0] - np.einsum("gd,gde->ge", token.k, s))
        s = s + token.k[..., None] * written[:, None]
        out.append(np.einsum("gd,gde->ge", q[t].astype(np.float64), s)[:, None])
    return np.array(out)


def empty(rows: int) -> DeltaState:
    geometry = Geometry(num_pages=1, page_size=1, num_rows=rows)
    sizes = GROUPS, 1, D, D
    dtype = jnp.dtype(jnp.float32)
    return DeltaState.create(geometry, sizes, TAPS, FOLDED, dtype, WHOLE, kind=ChannelInputs)


def as_nodes(inputs: ChannelInputs) -> DeltaNodes:
    channels: Any = np.zeros((*inputs.k.shape[:2], GROUPS, 3 * D), np.float32)
    return DeltaNodes(inputs=inputs, channels=channels)


def test_no_kernel_takes_such_tokens():
    state = empty(1)
    assert not state.window.has_kernels and state.window.g.shape == (1, FOLDED, GROUPS, D)


@pytest.mark.slow
def test_trees_after_prompts_agree_with_each_path():
    """Prompts are read in two pieces, which end inside of windows. Nodes of other branches are NaN.
    After the commit of a path the next token is read."""
    rng, rows, every = np.random.default_rng(0), 3, np.arange(3)
    lens, state = np.array([3, 13, 2 * FOLDED]), empty(rows)
    prompt, nodes = random_inputs(rng, rows, 2 * FOLDED), random_inputs(rng, rows, NODES)
    for start in (0, FOLDED):
        counts = np.clip(lens - start, 0, FOLDED)
        q, inputs = jax.tree.map(lambda x, at=start: x[:, at : at + FOLDED], prompt)
        _, state = read_run(state, every, np.minimum(lens, start), counts, q, as_nodes(inputs))
    sizes = [NODES, 9, 1]
    tree = random_tree(rng, np.zeros(rows, int), sizes, NODES, DEPTH)
    ancestors = unpack(tree.ancestors, size=NODES)
    parents = np.asarray(tree.parents)
    paths = [path_from_root(parents[row], size - 1) for row, size in enumerate(sizes)]
    q, inputs = nodes
    alone = jax.tree.map(lambda x: np.full_like(x, np.nan), inputs)
    for row, path in enumerate(paths):
        jax.tree.map(lambda to, x, at=(row, path): to.__setitem__(at, x[at]), alone, inputs)
    waiting = None
    for given in (inputs, alone):
        out, waiting = read_tree(state, every, lens, q, as_nodes(given), ancestors, tree.depth)
        for row, path in enumerate(paths):
            want = in_numpy(*after(prompt, nodes, row, lens[row], path))[lens[row] :]
            np.testing.assert_allclose(np.asarray(out)[row, path], want, atol=TOLERANCE)
    kept, ends = commit(waiting, committed(lens, paths)), lens + [len(path) for path in paths]
    following = random_inputs(rng, rows, 1)
    q, inputs = following
    out, _ = read_run(kept, every, ends, np.ones(rows, int), q, as_nodes(inputs))
    for row, path in enumerate(paths):
        before, token = after(prompt, nodes, row, lens[row], path), row_of(following, row)
        want = in_numpy(*jax.tree.map(lambda *x: np.concatenate(x), before, token))[-1]
        np.testing.assert_allclose(out[row, 0], want, atol=TOLERANCE)


def row_of(tokens: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row], tokens)


def after(prompt: Any, nodes: Any, row: int, length: int, path: list[int]) -> Any:
    """A row's prompt and the nodes of a path after it."""
    parts = [
        jax.tree.map(lambda x, at=at: x[row, at], of)
        for of, at in ((prompt, list(range(length))), (nodes, path))
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@pytest.mark.parametrize("length", [slow(2 * LONGEST_CHUNK + 5), slow(1)])
def test_whole_sequences_agree_with_the_definition(length: int):
    q, inputs = random_inputs(np.random.default_rng(3), 2, length)
    out = jit(ChannelInputs.sequences)(inputs, q)
    for row in range(2):
        want = in_numpy(*row_of((q, inputs), row))
        np.testing.assert_allclose(out[row], want, atol=TOLERANCE)


@pytest.mark.slow
def test_states_fold_to_equal_bits_however_prompts_are_cut():
    """Equal inputs, in pieces of 8 or of 5 tokens."""
    q, inputs = random_inputs(np.random.default_rng(4), 1, 40)
    states = []
    for size in (8, 5):
        state = empty(1)
        for start in range(0, 40, size):
            part = jax.tree.map(lambda x, at=start, n=size: x[:, at : at + n], (q, inputs))
            counts, lens = np.full(1, size), np.full(1, start)
            _, state = read_run(state, np.arange(1), lens, counts, part[0], as_nodes(part[1]))
        states.append(np.asarray(state.s))
    np.testing.assert_array_equal(*states)
