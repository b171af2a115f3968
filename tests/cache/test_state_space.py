"""Tokens that add to a state, over trees, in chunks and as whole sequences, against the definition
in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Geometry
from jaxspec.cache.delta_rule import LONGEST_CHUNK
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.cache.state_space import SumInputs
from jaxspec.parallel import WHOLE
from tests.cache.test_delta_rule import commit, committed, jit, unpack
from tests.helpers.marks import slow
from tests.helpers.random_trees import path_from_root, random_tree

GROUPS, HEADS, N, P, TAPS, FOLDED, NODES, DEPTH = 2, 2, 6, 4, 2, 8, 20, 6
SIZES = GROUPS, HEADS, N, P
TOLERANCE = 1e-5

read_tree, read_run = jit(DeltaState.read_tree), jit(DeltaState.read_run)


def random_inputs(rng: np.random.Generator, batch: int, size: int) -> tuple[Any, SumInputs]:
    """Queries and inputs as layers have them. Some heads forget in a token, some hardly at all."""
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    steps = rng.exponential(0.5, (batch, size, GROUPS, HEADS)).astype(np.float32)
    rates = np.array([0.01, 8], np.float32)
    arrays: dict[str, Any] = {
        "k": normal((batch, size, GROUPS, N)),
        "v": normal((batch, size, GROUPS, HEADS, P)),
        "g": -steps * rates,
        "beta": steps,
    }
    return normal((batch, size, GROUPS, N)), SumInputs(**arrays)


def in_numpy(q: Any, inputs: SumInputs) -> np.ndarray:
    """Outputs [T, G, r, P] of a row's tokens, from an empty state."""
    s, out = np.zeros(SIZES), []
    for t in range(len(q)):
        token = jax.tree.map(lambda x, t=t: x[t].astype(np.float64), inputs)
        k, v, g, beta = token.k, token.v, token.g, token.beta
        s = np.exp(g)[..., None, None] * s
        s = s + k[:, None, :, None] * (beta[..., None] * v)[..., None, :]
        out.append(np.einsum("gn,grnp->grp", q[t].astype(np.float64), s))
    return np.array(out)


def empty(rows: int) -> DeltaState:
    geometry = Geometry(num_pages=1, page_size=1, num_rows=rows)
    return DeltaState.create(
        geometry, SIZES, TAPS, FOLDED, jnp.dtype(jnp.float32), WHOLE, kind=SumInputs
    )


def as_nodes(inputs: SumInputs) -> DeltaNodes:
    channels: Any = np.zeros((*inputs.k.shape[:2], GROUPS, 2 * N + HEADS * P), np.float32)
    return DeltaNodes(inputs=inputs, channels=channels)


def test_no_kernel_takes_such_tokens():
    assert not empty(1).window.has_kernels


@pytest.mark.slow
def test_trees_after_prompts_agree_with_each_path():
    """Prompts are read in two pieces, which end inside of windows. After the commit of a path the
    next token is read."""
    rng, rows, every = np.random.default_rng(0), 3, np.arange(3)
    lens, state = np.array([3, 13, 2 * FOLDED]), empty(rows)
    prompt, nodes = random_inputs(rng, rows, 2 * FOLDED), random_inputs(rng, rows, NODES)
    for start in (0, FOLDED):
        counts = np.clip(lens - start, 0, FOLDED)
        q, inputs = jax.tree.map(lambda x, at=start: x[:, at : at + FOLDED], prompt)
        first = np.minimum(lens, start)
        _, state = read_run(state, every, first, counts, q, as_nodes(inputs))
    sizes = [NODES, 9, 1]
    tree = random_tree(rng, np.zeros(rows, int), sizes, NODES, DEPTH)
    ancestors = unpack(tree.ancestors, size=NODES)
    q, inputs = nodes
    out, waiting = read_tree(
        state, np.arange(rows), lens, q, as_nodes(inputs), ancestors, tree.depth
    )
    parents = np.asarray(tree.parents)
    paths = [path_from_root(parents[row], size - 1) for row, size in enumerate(sizes)]
    for row, path in enumerate(paths):
        want = in_numpy(*after(prompt, nodes, row, lens[row], path))[lens[row] :]
        np.testing.assert_allclose(np.asarray(out)[row, path], want, atol=TOLERANCE * 10)
    kept, ends = commit(waiting, committed(lens, paths)), lens + [len(path) for path in paths]
    following = random_inputs(rng, rows, 1)
    q, inputs = following
    out, _ = read_run(kept, every, ends, np.ones(rows, int), q, as_nodes(inputs))
    for row, path in enumerate(paths):
        before, token = after(prompt, nodes, row, lens[row], path), row_of(following, row)
        want = in_numpy(*jax.tree.map(lambda *x: np.concatenate(x), before, token))[-1]
        np.testing.assert_allclose(out[row, 0], want, atol=TOLERANCE * 10)


def row_of(tokens: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row], tokens)


def after(prompt: Any, nodes: Any, row: int, length: int, path: list[int]) -> Any:
    """A row's prompt and the nodes of a path after it."""
    parts = [
        jax.tree.map(lambda x, at=at: x[row, at], of)
        for of, at in ((prompt, list(range(length))), (nodes, path))
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@pytest.mark.parametrize("length", [slow(LONGEST_CHUNK + 5), slow(1)])
def test_whole_sequences_agree_with_the_definition(length: int):
    q, inputs = random_inputs(np.random.default_rng(3), 2, length)
    out = jit(SumInputs.sequences)(inputs, q)
    for row in range(2):
        want = in_numpy(*row_of((q, inputs), row))
        np.testing.assert_allclose(out[row], want, atol=TOLERANCE * np.abs(want).max())
