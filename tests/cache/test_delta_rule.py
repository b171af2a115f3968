"""The gated delta rule over trees and in chunks, against its definition token by token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec.cache import CommittedPath, Geometry, delta_rule
from jaxspec.cache.delta_rule import LONGEST_CHUNK, DeltaInputs
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.decoding.trees.tree import DraftTree, unpack_mask
from jaxspec.parallel import Layout
from pallas_kernels.delta_rule import LayerRows, RowStates, delta_commit, delta_read
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_trees import path_from_root, random_tree

GROUPS, VALUES, K_DIM, V_DIM, TAPS = 2, 2, 16, 8, 4
NODES, DEPTH, FOLDED = 64, 16, 8
# Default tests read prompts of so many rows and tokens, and trees of so many nodes: in one program
# each, for all of them.
ROWS, PROMPT, WIDTH = 4, 5 * FOLDED + 2, 8
CHANNELS = 2 * K_DIM + VALUES * V_DIM
TOLERANCE = 1e-5

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
read_tree, read_run = jit(DeltaState.read_tree), jit(DeltaState.read_run)
read_by_delta_run = jit(DeltaState.read_by_delta_run, static_argnames=("implementation",))
commit = jit(lambda state, path: DeltaState.commit([state], path, NO_KERNELS)[0])
convolved = jit(DeltaState.convolved)
defined_read, defined_commit = jit(delta_read), jit(delta_commit)
unpack = jit(unpack_mask, static_argnames="size")


def random_inputs(
    rng: np.random.Generator,
    batch: int,
    size: int,
    sizes: tuple[int, int, int, int] = (GROUPS, VALUES, K_DIM, V_DIM),
) -> tuple[Any, Any]:
    """Queries and inputs as layers have them: keys and queries of unit length.

    NumPy's, so that tests can take parts of any size without a program for each.
    """
    groups, values, k_dim, v_dim = sizes

    def unit() -> np.ndarray:
        x = rng.standard_normal((batch, size, groups, k_dim))
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    heads = (batch, size, groups, values)
    q = unit() / np.float32(k_dim**0.5)
    arrays: dict[str, Any] = {
        "k": unit(),
        "v": rng.standard_normal((*heads, v_dim)).astype(np.float32),
        "g": -rng.exponential(0.3, heads).astype(np.float32),
        "beta": rng.random(heads).astype(np.float32),
    }
    return q, DeltaInputs(**arrays)


def as_nodes(inputs: DeltaInputs) -> DeltaNodes:
    zeros: Any = np.zeros((*inputs.k.shape[:2], GROUPS, CHANNELS), np.float32)
    return DeltaNodes(inputs=inputs, channels=zeros)


def with_channels(rng: np.random.Generator, inputs: DeltaInputs) -> DeltaNodes:
    nodes = as_nodes(inputs)
    return nodes.replace(channels=rng.standard_normal(nodes.channels.shape).astype(np.float32))


def empty(rows: int) -> DeltaState:
    heads = (GROUPS, VALUES, K_DIM, V_DIM)
    geometry = Geometry(num_pages=1, page_size=1, num_rows=rows)
    create = functools.partial(DeltaState.create, geometry, heads, TAPS, FOLDED)
    shapes = jax.eval_shape(lambda: create(jnp.dtype(jnp.float32), Layout()))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def run(state: DeltaState, lens: Any, counts: Any, q: Any, inputs: DeltaInputs):
    return read_run(state, np.arange(len(lens)), lens, counts, q, as_nodes(inputs))


def after_prompts(rng: np.random.Generator, lens: np.ndarray) -> DeltaState:
    """Random prompts of so many tokens [ROWS] read."""
    prompts = random_inputs(rng, ROWS, PROMPT)
    return run(empty(ROWS), np.zeros_like(lens), lens, *prompts)[1]


@jit
def folded(state: DeltaState, held: Array) -> Array:
    return delta_rule.fold(state.s, state.window.where(held))


def whole_state(state: DeltaState, lens: np.ndarray) -> np.ndarray:
    """S after ``lens`` tokens, those in the window included."""
    held = np.arange(FOLDED) < (lens % FOLDED)[:, None]
    return np.asarray(folded(state, held)).swapaxes(-1, -2)


def in_numpy(q: Array, inputs: DeltaInputs) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of one row's tokens in float64, from an empty state: outputs [T, G, r, Dv] and
    the last state."""
    q64, k, v, g, beta = (
        np.asarray(x, np.float64) for x in (q, inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    s, out = np.zeros((GROUPS, VALUES, K_DIM, V_DIM)), []
    for t in range(len(k)):
        s = s * np.exp(g[t])[..., None, None]
        written = beta[t][..., None] * (v[t] - np.einsum("gd,grde->gre", k[t], s))
        s = s + k[t][:, None, :, None] * written[..., None, :]
        out.append(np.einsum("gd,grde->gre", q64[t], s))
    return np.array(out).reshape(-1, GROUPS, VALUES, V_DIM), s


def tree_errors(trees: int) -> tuple[float, float]:
    """Largest errors of outputs and of committed states over random trees after random prompts."""
    rng, rows, worst = np.random.default_rng(0), 4, [0.0, 0.0]
    for _ in range(trees // rows):
        lens = rng.integers(0, 2 * FOLDED, rows)
        prompt = random_inputs(rng, rows, 2 * FOLDED)
        _, state = run(empty(rows), np.zeros_like(lens), lens, *prompt)
        sizes = rng.integers(1, NODES + 1, rows).tolist()
        tree = random_tree(rng, np.zeros(rows, int), sizes, NODES, DEPTH)
        nodes = random_inputs(rng, rows, NODES)
        out, waiting = verified(state, lens, tree, *nodes)
        out = np.asarray(out)  # paths of each length are taken without a program of their own
        every = [
            [path_from_root(np.asarray(tree.parents[row]), node) for node in range(size)]
            for row, size in enumerate(sizes)
        ]
        paths = [own[rng.integers(len(own))] for own in every]
        after = commit(waiting, committed(lens, paths))
        ends = whole_state(after, lens + [len(path) for path in paths])
        for row, length in enumerate(lens.tolist()):
            for path in every[row]:
                parts = [
                    jax.tree.map(lambda x, row=row, at=at: np.asarray(x)[row, at], of)
                    for of, at in ((prompt, list(range(length))), (nodes, path))
                ]
                want, s = in_numpy(*jax.tree.map(lambda *x: np.concatenate(x), *parts))
                worst[0] = max(worst[0], np.abs(want[length:] - out[row, np.array(path)]).max())
                if path == paths[row]:
                    worst[1] = max(worst[1], np.abs(s - ends[row]).max())
    return worst[0], worst[1]


def verified(state: DeltaState, lens: Any, tree: DraftTree, q: Any, inputs: DeltaInputs):
    ancestors = unpack(tree.ancestors, size=tree.tokens.shape[1])
    rows = np.arange(len(lens))
    return read_tree(state, rows, lens, q, as_nodes(inputs), ancestors, tree.depth)


def committed(lens: Any, paths: list[list[int]]) -> CommittedPath:
    array: Any = functools.partial(np.array, dtype=np.int32)
    padded = np.zeros((len(paths), DEPTH + 1), np.int32)
    for row, path in zip(padded, paths, strict=True):
        row[: len(path)] = path
    return CommittedPath(
        rows=array(range(len(paths))),
        page_table=array([[0]] * len(paths)),
        context_lens=lens,
        path=array(padded),
        counts=array([len(path) for path in paths]),
        is_chain=False,
    )


# By default: the two tests that read trees further down.
@pytest.mark.slow
@pytest.mark.parametrize("trees", [4, 200])
def test_trees_agree_with_each_paths_recurrence(trees: int):
    outputs, states = tree_errors(trees)
    print(f"{trees} trees: outputs {outputs:.1e}, states {states:.1e}")
    assert outputs < TOLERANCE and states < TOLERANCE


def test_prompts_read_in_chunks_agree_with_the_recurrence_and_leave_the_same_bits():
    rng, size = np.random.default_rng(1), PROMPT  # pieces of 7 fit
    q, inputs = random_inputs(rng, ROWS, size)
    states, outputs = [], []
    for width in (size, 7, 1):
        state, out, done = empty(ROWS), [], 0
        while done < size:
            count = min(width, size - done)
            part = jax.tree.map(lambda x, a=done, n=count: x[:, a : a + n], (q, inputs))
            lens = np.full(ROWS, done)
            one, state = run(state, lens, np.full(ROWS, count), *part)
            out.append(one)
            done += count
        states.append(state)
        outputs.append(np.concatenate(out, axis=1))
    end = whole_state(states[0], np.full(ROWS, size))
    for row in range(ROWS):
        want, s = in_numpy(*jax.tree.map(lambda x, row=row: x[row], (q, inputs)))
        assert np.abs(want - outputs[0][row]).max() < TOLERANCE
        assert np.abs(s - end[row]).max() < TOLERANCE
    for state, out in zip(states[1:], outputs[1:], strict=True):
        assert_same_bits(state, states[0], size)
        assert np.abs(out - outputs[0]).max() < TOLERANCE


@pytest.mark.parametrize("length", [1, slow(7), slow(LONGEST_CHUNK), 2 * LONGEST_CHUNK + 5])
def test_whole_sequences_and_their_gradients_agree_with_the_recurrence(length: int):
    rng = np.random.default_rng(3)
    q, inputs = random_inputs(rng, 2, length)
    weights = rng.standard_normal(inputs.v.shape).astype(np.float32)
    start = jnp.zeros((2, GROUPS, VALUES, V_DIM, K_DIM))

    def by_definition(q: Array, inputs: DeltaInputs) -> Array:
        return delta_rule.recurrence(start, q, inputs)[0]

    def with_gradient(read: Any) -> tuple[Array, Any]:
        def total(q: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
            out = read(q, inputs)
            return jnp.sum(weights * out), out

        gradient = jit(jax.grad(total, argnums=(0, 1), has_aux=True))
        gradients, out = gradient(q, inputs)
        return out, gradients

    out, gradients = with_gradient(delta_rule.sequences)
    want, wanted = with_gradient(by_definition)
    np.testing.assert_allclose(out, want, atol=TOLERANCE)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.abs(one - other).max() <= TOLERANCE * np.abs(other).max()


def test_sequences_of_like_keys_that_hardly_decay_agree_with_the_recurrence():
    """There powers of the triangular matrix, of which an inverse could be the sum, are huge."""
    q, inputs = random_inputs(np.random.default_rng(4), 1, 2 * LONGEST_CHUNK)
    like = inputs.k + 4 * inputs.k[:, :1]
    like = like / np.linalg.norm(like, axis=-1, keepdims=True)
    inputs = inputs.replace(k=like, g=inputs.g / 1000, beta=np.full_like(inputs.beta, 0.99))
    want, _ = in_numpy(*jax.tree.map(lambda x: x[0], (q, inputs)))
    out = jit(delta_rule.sequences)(q, inputs)[0]
    assert np.abs(want - out).max() < TOLERANCE * np.abs(want).max()


def assert_same_bits(state: DeltaState, other: DeltaState, lens: int) -> None:
    """Of all that later tokens read."""
    state, other = jax.device_get((state, other))
    np.testing.assert_array_equal(state.s, other.s)
    np.testing.assert_array_equal(state.channels, other.channels)
    for one, two in zip(jax.tree.leaves(state.window), jax.tree.leaves(other.window), strict=True):
        np.testing.assert_array_equal(one[:, : lens % FOLDED], two[:, : lens % FOLDED])


@pytest.mark.parametrize("tokens", [30, slow(4096)])
def test_rounds_of_any_trees_leave_the_bits_of_single_tokens(tokens: int):
    rng = np.random.default_rng(2)
    q, inputs = random_inputs(rng, ROWS, tokens + DEPTH)

    def decode(depth: int) -> tuple[DeltaState, np.ndarray]:
        """The first row's tokens; the others' trees are rejected."""
        state, out, done = empty(ROWS), [], 0
        while done < tokens:
            size = int(rng.integers(1, WIDTH + 1)) if depth else 1
            tree = random_tree(rng, np.zeros(ROWS, int), [size] * ROWS, WIDTH, depth or 1)
            leaf = int(rng.integers(size))
            path = path_from_root(np.asarray(tree.parents[0]), leaf)[: tokens - done]
            noise = random_inputs(rng, ROWS, WIDTH)
            place, at = np.array(path), slice(done, done + len(path))
            nodes = noise
            for x, y in zip(jax.tree.leaves(nodes), jax.tree.leaves((q, inputs)), strict=True):
                x[:, place] = y[:, at]
            lens = np.array([done, 0, 0, 0])
            one, waiting = verified(state, lens, tree, *nodes)
            state = commit(waiting, committed(lens, [path, [], [], []]))
            out.append(np.asarray(one)[0, place])
            done += len(path)
        return state, np.concatenate(out)

    plain, plain_out = decode(0)
    trees, trees_out = decode(6)
    first: Any = functools.partial(jax.tree.map, lambda x: np.asarray(x)[:1])
    assert_same_bits(first(trees), first(plain), tokens)
    assert np.abs(trees_out - plain_out).max() < TOLERANCE
    # Reading a prompt is another program: XLA may round its loop's body otherwise.
    prompt = jax.tree.map(lambda x: x[:, : max(tokens, PROMPT)], (q, inputs))
    _, read = run(empty(ROWS), np.zeros(ROWS, int), np.full(ROWS, tokens), *prompt)
    assert np.abs(np.subtract(read.s, plain.s))[0].max() < TOLERANCE
    _, s = in_numpy(*jax.tree.map(lambda x: x[0, :tokens], (q, inputs)))
    drift = np.abs(whole_state(trees, np.full(ROWS, tokens))[0] - s).max()
    print(f"{tokens} tokens: drift of the state {drift:.1e}")
    assert drift < 1e-4


def test_noise_of_padding_other_branches_and_other_rows_stays_there():
    rng = np.random.default_rng(3)
    lens, sizes = np.array([5, 9, 0, 16]), [6, 4, 1, 8]
    prompt = random_inputs(rng, ROWS, PROMPT)
    _, clean = run(empty(ROWS), np.zeros_like(lens), lens, *prompt)
    tree = random_tree(rng, np.zeros(ROWS, int), sizes, WIDTH, 3)
    nodes = random_inputs(rng, ROWS, WIDTH)
    path = path_from_root(np.asarray(tree.parents[0]), 5)
    paths = [path, [0], [], []]
    want, waiting = verified(clean, lens, tree, *nodes)
    after = commit(waiting, committed(lens, paths))

    on_path = np.zeros((ROWS, WIDTH), bool)
    on_path[0, path], on_path[1, :4] = True, True
    held = np.arange(FOLDED) < (lens % FOLDED)[:, None]
    bad_nodes = jax.tree.map(lambda x: spoiled(x, on_path), nodes)
    dirty = clean.replace(window=jax.tree.map(lambda x: spoiled(x, held), clean.window))
    got, waiting = verified(dirty, lens, tree, *bad_nodes)
    after_noise = commit(waiting, committed(lens, paths))
    np.testing.assert_array_equal(np.asarray(got)[on_path], np.asarray(want)[on_path])
    np.testing.assert_array_equal(after_noise.s, after.s)

    padded = jax.tree.map(lambda x: spoiled(x, np.arange(PROMPT) < lens[:, None]), prompt)
    _, read = run(dirty, np.zeros_like(lens), lens, *padded)
    _, again = run(clean, np.zeros_like(lens), lens, *prompt)
    np.testing.assert_array_equal(read.s, again.s)


def spoiled(x: Any, kept: np.ndarray) -> np.ndarray:
    """x [B, T, ...] with NaN where not ``kept`` [B, T]."""
    return np.where(kept.reshape(*kept.shape, *(1,) * (x.ndim - 2)), x, np.float32(np.nan))


def test_what_kernels_are_held_against_agrees():
    """Reading and committing trees as pallas_kernels.delta_rule defines them."""
    rng, rows = np.random.default_rng(6), np.array([2, 0, 3, 1])
    lens, sizes = np.array([5, 14, 7, 0]), [6, 4, 8, 1]
    state = after_prompts(rng, lens[np.argsort(rows)])
    tree = random_tree(rng, np.zeros(ROWS, int), sizes, WIDTH, 3)
    q, inputs = random_inputs(rng, ROWS, WIDTH)
    nodes = with_channels(rng, inputs)
    ancestors = unpack(tree.ancestors, size=WIDTH)
    out, waiting = read_tree(state, rows, lens, q, nodes, ancestors, tree.depth)
    paths = [path_from_root(np.asarray(tree.parents[row]), sizes[row] - 1) for row in range(ROWS)]
    paths[1] = []
    path = committed(lens, paths).replace(rows=rows)
    after = commit(waiting, path)

    held: Any = lens % FOLDED
    states = RowStates(state.s, state.window.tokens, path.rows, held)
    read = defined_read(states, q, inputs.tokens, ancestors, tree.depth)
    errors = np.abs(np.subtract(read, out))
    assert errors[np.arange(WIDTH) < np.asarray(sizes)[:, None]].max() < TOLERANCE
    layer = LayerRows(state.s, state.window.tokens, state.channels, inputs.tokens, nodes.channels)
    arguments = path.rows, held, path.path, path.counts
    [(s, window, channels)] = jax.device_get(defined_commit([layer], *arguments))
    after = jax.device_get(after)
    assert np.abs(s - after.s).max() < TOLERANCE
    np.testing.assert_array_equal(channels, after.channels)
    left = np.zeros(ROWS, int)
    left[rows] = (lens + path.counts) % FOLDED
    for one, other in zip(window, after.window.tokens, strict=True):
        for row, count in enumerate(left):
            np.testing.assert_array_equal(one[row, :count], other[row, :count])


@pytest.mark.parametrize("size", [slow(3), slow(8), slow(21), PROMPT])
def test_prompts_read_by_delta_run_leave_what_chunks_leave(size: int):
    """Reading prompts as pallas_kernels.delta_rule defines it."""
    rng = np.random.default_rng(7)
    rows, lens = np.array([2, 0, 3, 1]), np.array([5, 14, 7, 0])
    state = after_prompts(rng, lens[np.argsort(rows)])
    q, inputs = random_inputs(rng, ROWS, size)
    nodes, counts = with_channels(rng, inputs), np.array([size, size - 1, 0, 1])
    out, after = jax.device_get(read_run(state, rows, lens, counts, q, nodes))
    by_delta_run = read_by_delta_run(
        state, rows, lens % FOLDED, counts, q, nodes, implementation="reference"
    )
    found, own = jax.device_get(by_delta_run)
    valid = np.arange(size) < counts[:, None]
    assert np.abs(found - out)[valid].max() < TOLERANCE
    assert not found[~valid].any()
    assert np.abs(own.s - after.s).max() < TOLERANCE
    np.testing.assert_array_equal(own.channels, after.channels)
    left = ((lens + counts) % FOLDED)[np.argsort(rows)]
    for one, other in zip(own.window.tokens, after.window.tokens, strict=True):
        for row, count in enumerate(left):
            np.testing.assert_array_equal(one[row, :count], other[row, :count])


def test_convolution_takes_the_ancestors():
    rng, size = np.random.default_rng(4), 10
    tree = random_tree(rng, np.zeros(2, int), [10, 7], size, 5)
    ancestors = unpack(tree.ancestors, size=size)
    state = empty(2)
    before, nodes = (
        rng.standard_normal((2, n, GROUPS, CHANNELS)).astype(np.float32) for n in (TAPS - 1, size)
    )
    weight = rng.standard_normal((TAPS, GROUPS, CHANNELS)).astype(np.float32)
    state = state.replace(channels=before)
    rows = np.arange(2)
    got = np.asarray(convolved(state, rows, nodes, weight, ancestors, tree.depth))
    for row, count in ((0, 10), (1, 7)):
        for node in range(count):
            path = path_from_root(np.asarray(tree.parents[row]), node)
            own = np.concatenate([before[row], nodes[row, np.array(path)]])[-TAPS:]
            want = np.einsum("kgc,kgc->gc", own.astype(np.float64), weight)
            assert np.abs(got[row, node] - want).max() < TOLERANCE
    chain = np.asarray(convolved(state, rows, nodes, weight, None, None))
    want = np.concatenate([before, nodes], axis=1)[:, 4 : 4 + TAPS]
    assert np.abs(chain[:, 4] - np.einsum("bkgc,kgc->bgc", want, weight)).max() < TOLERANCE


def test_rows_are_cleared_copied_and_put_back():
    rng = np.random.default_rng(5)
    lens, none = np.array([13, 6, 11, 8]), np.zeros(0, np.int32)
    state = after_prompts(rng, lens)
    saved = jit(DeltaState.take)(state, none, np.array([2]))
    cleared = jit(DeltaState.reset)(state, np.array([2, 7]))
    back = jit(DeltaState.put)(cleared, saved, none, np.array([0]))
    state, cleared, back = jax.device_get((state, cleared, back))
    assert not np.any(cleared.s[2]) and np.array_equal(cleared.s[:2], state.s[:2])
    for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one[0], two[2])
        np.testing.assert_array_equal(one[1], two[1])
