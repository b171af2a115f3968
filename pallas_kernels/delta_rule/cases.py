"""Shapes of delta_rule that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.delta_rule import delta_commit, delta_read, delta_run
from pallas_kernels.delta_rule.tokens import LayerRows, RowStates, Tokens
from pallas_kernels.selection import Implementation


@dataclasses.dataclass(frozen=True)
class Case:
    """``batch`` sequences that verify ``nodes`` nodes; heads as in the kernels."""

    batch: int
    nodes: int
    groups: int = 2
    values: int = 2
    v_dim: int = 128
    capacity: int = 8
    k_dim: int = 128
    taps: int = 4

    def __str__(self) -> str:
        return f"{self.sizes}, windows of {self.capacity}"

    @property
    def sizes(self) -> str:
        """Trees and heads, in words."""
        heads = f"{self.groups} x {self.values} heads of {self.v_dim}"
        return f"{self.batch} x {self.nodes} nodes, {heads}"

    @property
    def wide(self) -> int:
        """Inputs of the convolution, of a key head."""
        return 2 * self.k_dim + self.values * self.v_dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.groups * self.values * self.v_dim * self.k_dim

    @property
    def token_bytes(self) -> int:
        """What a token does to the state: an entry of the window."""
        return 4 * self.groups * (self.k_dim + self.values * (self.v_dim + 2))

    @property
    def node_bytes(self) -> int:
        """A token, its query and its output."""
        return self.token_bytes + 4 * self.groups * (self.k_dim + self.values * self.v_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of delta_read: states, half of each window, and nodes."""
        row = self.state_bytes + self.capacity * self.token_bytes // 2
        return self.batch * (row + self.nodes * self.node_bytes)

    def commit_bytes(self, accepted: int) -> int:
        """Bytes of delta_commit: tokens moved to the window, inputs of the convolution, and every
        ``capacity`` tokens a window and its state read, and the state written."""
        folding = 2 * self.state_bytes + self.capacity * self.token_bytes
        channels = 2 * (2 * (self.taps - 1) + accepted) * self.groups * self.wide
        row = accepted * folding // self.capacity + 2 * accepted * self.token_bytes + channels
        return self.batch * row

    @property
    def run_bytes(self) -> int:
        """Bytes of delta_run after empty windows."""
        return self.batch * (2 * self.state_bytes + self.nodes * self.node_bytes)

    @property
    def read_flops(self) -> int:
        """FLOPs of what keys and queries of nodes read from states."""
        return self.batch * self.nodes * self.state_bytes


TEST_CASES = (
    Case(1, 1),
    Case(2, 6),
    Case(3, 16, groups=1, v_dim=64),
    Case(2, 4, groups=1, values=4, capacity=32),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[tuple, tuple]:
    """Positional arguments of delta_read and of delta_commit."""
    rng = np.random.default_rng(seed)
    rows = case.batch + 2
    s, channels = _states(case, seed, rows)
    _, *window = _noisy_tokens(case, seed, 20, rows, case.capacity)
    q, *drafted = _noisy_tokens(case, seed, 10, case.batch, case.nodes)
    places = jnp.asarray(rng.permutation(rows)[: case.batch], jnp.int32)
    held = jnp.asarray(rng.integers(0, case.capacity, case.batch), jnp.int32)
    states = RowStates(s, Tokens(*window), places, held)
    ancestors, depth, path, counts = _trees(rng, case)
    nodes = Tokens(*drafted)
    layer = LayerRows(s, states.window, channels, nodes, _new_channels(case, seed))
    return (states, q, nodes, ancestors, depth), ([layer], places, held, path, counts)


def make_run_arguments(case: Case, seed: int = 0) -> tuple:
    """Positional arguments of delta_run, of ``nodes`` tokens, of which some are padding."""
    (states, q, tokens, *_), _ = make_arguments(case, seed)
    counts = jnp.asarray([case.nodes, 0, *range(1, case.batch - 1)][: case.batch], jnp.int32)
    return states, counts, q, tokens


def _trees(rng: np.random.Generator, case: Case) -> tuple[Array, Array, Array, Array]:
    """Ancestors [B, N, N], depths [B, N], and a path [B, A] in each tree with its length [B]."""
    longest = min(case.nodes, 6)
    ancestors = np.zeros((case.batch, case.nodes, case.nodes), bool)
    path, counts = np.zeros((case.batch, longest), np.int32), np.zeros(case.batch, np.int32)
    for row, mask in enumerate(ancestors):
        for node in range(case.nodes):
            parents = [other for other in range(node) if mask[other].sum() < longest]
            if parents:
                mask[node] = mask[rng.choice(parents)]
            mask[node, node] = True
        accepted = np.flatnonzero(mask[rng.integers(case.nodes)])
        counts[row] = len(accepted) if row != 1 else 0  # a row that does not change
        path[row, : len(accepted)] = accepted
    depth = jnp.asarray(ancestors.sum(-1) - 1, jnp.int32)
    return jnp.asarray(ancestors), depth, jnp.asarray(path), jnp.asarray(counts)


@dataclasses.dataclass(frozen=True)
class Round:
    """``case.batch`` rows of a pool verify a tree and accept about half of its depth.

    Each call takes the rows after those of the call before. The pool is larger than a GPU's cache.

    Attributes:
      levels: nodes of each depth, the same in all rows; ``case.nodes`` together.
      pool: rows with a state; a multiple of the batch.
    """

    case: Case
    levels: tuple[int, ...]
    pool: int = 128

    def __str__(self) -> str:
        return f"{self.case.batch} x {self.case.nodes} nodes"

    @property
    def accepted(self) -> int:
        return (len(self.levels) + 1) // 2


# Of a layer of Qwen3.5-9B: 1, 2, 4, 8, 16, 32 and 64 nodes. Chains, and trees as wide as the
# speculation's.
LEVELS = (
    (1,),
    (1, 1),
    (1, 1, 1, 1),
    (1, 3, 2, 2),
    (1, 3, 3, 3, 3, 3),
    (1, 6, 5, 5, 5, 5, 5),
    (1, *(9,) * 7),
)
BENCHMARK_ROUNDS = tuple(
    Round(Case(batch, sum(levels), groups=16, capacity=16), levels)
    for batch in (1, 8, 32)
    for levels in LEVELS
)
BENCHMARK_RUNS = tuple(
    Round(Case(batch, 512, groups=16, capacity=16), (1,) * 512) for batch in (1, 8, 32)
)
STEP_SECONDS = 2e-5  # of a loop in XLA, at least
TOKEN_SECONDS = 1e-6  # of a prompt in the kernel, at least
KEPT = 8  # arguments that a round hands to the next: states, windows, channels, rows, lengths
SMALL = 1e-12  # share of an output that the next queries get


def benchmarks() -> Sequence[Benchmark]:
    """Trees that are read, rounds (a tree read and its path committed), and prompts."""
    return [
        *(make(size) for make in (read_benchmark, round_benchmark) for size in BENCHMARK_ROUNDS),
        *(run_benchmark(size) for size in BENCHMARK_RUNS),
    ]


def read_benchmark(size: Round) -> Benchmark:
    """delta_read; the reference goes through the nodes one by one."""
    benchmark = beside_reference(
        size.case,
        functools.partial(round_arguments, size),
        _read,
        _feed,
        flops=size.case.read_flops,
    )
    return dataclasses.replace(
        benchmark,
        name=f"read {size}",
        reference_seconds=size.case.nodes * STEP_SECONDS,
    )


def round_benchmark(size: Round) -> Benchmark:
    """delta_read and delta_commit; the reference goes through nodes and tokens one by one."""
    read = read_benchmark(size)
    return dataclasses.replace(
        read,
        name=f"round {size}",
        call=functools.partial(_whole_round, implementation=read.implementation),
        reference=functools.partial(_whole_round, implementation="reference"),
        num_bytes=size.case.num_bytes + size.case.commit_bytes(size.accepted),
        reference_seconds=(size.case.nodes + size.accepted * size.case.capacity) * STEP_SECONDS,
    )


def run_benchmark(size: Round) -> Benchmark:
    """delta_run of a prompt; the reference is a loop over its tokens."""
    benchmark = beside_reference(
        size.case,
        functools.partial(run_arguments, size),
        _run,
        _feed,
        flops=2 * size.case.read_flops,  # tokens are written, too
    )
    return dataclasses.replace(
        benchmark,
        name=f"prompt {size.case.batch} x {size.case.nodes}",
        num_bytes=size.case.run_bytes,
        seconds=size.case.nodes * TOKEN_SECONDS,
        reference_seconds=size.case.nodes * STEP_SECONDS,
    )


def round_arguments(size: Round, seed: int) -> Arguments:
    """Arguments of all calls: what a round hands on, queries and inputs of nodes, new inputs of the
    convolution, ancestors, depth, path and counts."""
    case = size.case
    ancestors, depth, path = _leveled_trees(size)
    return (
        *_pool(size, seed),
        *_noisy_tokens(case, seed, 10, case.batch, case.nodes),
        _new_channels(case, seed),
        jnp.asarray(ancestors),
        jnp.asarray(depth),
        jnp.asarray(path),
        jnp.full(case.batch, size.accepted, jnp.int32),
    )


def run_arguments(size: Round, seed: int) -> Arguments:
    """The first arguments of ``round_arguments``, of a prompt's tokens after empty windows."""
    *kept, lens = _pool(size, seed)
    case = size.case
    return *kept, jnp.zeros_like(lens), *_noisy_tokens(case, seed, 10, case.batch, case.nodes)


def _pool(size: Round, seed: int) -> tuple[Array, ...]:
    """States, windows, channels, the first call's rows, and lengths [pool] of all remainders."""
    case, pool = size.case, size.pool
    s, channels = _states(case, seed, pool)
    _, *window = _noisy_tokens(case, seed, 20, pool, case.capacity)
    rows = jnp.arange(case.batch, dtype=jnp.int32)
    return s, *window, channels, rows, 7 * jnp.arange(pool, dtype=jnp.int32) % case.capacity


def _states(case: Case, seed: int, rows: int) -> tuple[Array, Array]:
    """States of so many rows, and the last inputs of their convolutions."""
    return (
        noise(seed, 0, (rows, case.groups, case.values, case.v_dim, case.k_dim)),
        noise(seed, 1, (rows, case.taps - 1, case.groups, case.wide), jnp.bfloat16),
    )


def _new_channels(case: Case, seed: int) -> Array:
    """Inputs of the convolution of each node."""
    shape = case.batch, case.nodes, case.groups, case.wide + case.values * case.v_dim
    return noise(seed, 30, shape, jnp.bfloat16)


def _noisy_tokens(case: Case, seed: int, index: int, batch: int, size: int) -> tuple[Array, ...]:
    """Queries, and Tokens: keys of unit length, decays below 1, strengths between 0 and 1."""
    heads = (batch, size, case.groups, case.values)
    q, k = (
        noise(seed, index + place, (*heads[:3], case.k_dim)) / case.k_dim**0.5 for place in (0, 1)
    )
    v, g, beta = (
        noise(seed, index + 2, (*heads, case.v_dim)),
        -0.1 * jnp.abs(noise(seed, index + 3, heads)),
        1 / (1 + jnp.exp(noise(seed, index + 4, heads))),
    )
    return q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, g, beta


def _leveled_trees(size: Round) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random ancestors [B, N, N], depths [B, N], and a path [B, A] to a node of the last level."""
    rng, batch = np.random.default_rng(0), size.case.batch
    starts = np.cumsum((0, *size.levels))
    ancestors = np.broadcast_to(np.eye(starts[-1], dtype=bool), (batch, *starts[[-1, -1]])).copy()
    for level in range(1, len(size.levels)):
        above, first, end = starts[level - 1 : level + 2]
        parents = rng.integers(above, first, (batch, end - first))
        ancestors[:, first:end] |= np.take_along_axis(ancestors, parents[..., None], axis=1)
    depth = np.repeat(np.arange(len(size.levels), dtype=np.int32), size.levels)
    path = np.stack([np.flatnonzero(mask[-1]) for mask in ancestors]).astype(np.int32)
    return ancestors, np.broadcast_to(depth, (batch, len(depth))), path


# Calls as benchmarks chain them: each takes the rows after those of the one before.


def _read(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
    """delta_read; nothing is committed."""
    s, *window, channels, rows, lens = arguments[:KEPT]
    q, *nodes, _, ancestors, depth, _, _ = arguments[KEPT:]
    held = lens[rows] % window[0].shape[1]
    states = RowStates(s, Tokens(*window), rows, held)
    out = delta_read(states, q, Tokens(*nodes), ancestors, depth, implementation)
    return out, s, *window, channels, _next(rows, s), lens


def _whole_round(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
    """delta_read, then delta_commit."""
    out, s, *window, channels, following, lens = _read(*arguments, implementation=implementation)
    rows = arguments[KEPT - 2]
    _, *nodes, new, _, _, path, counts = arguments[KEPT:]
    out, path = lax.optimization_barrier((out, path))  # what is accepted depends on what was read
    held = lens[rows] % window[0].shape[1]
    layer = LayerRows(s, Tokens(*window), channels, Tokens(*nodes), new)
    [(s, after, channels)] = delta_commit([layer], rows, held, path, counts, implementation)
    return out, s, *after, channels, following, lens.at[rows].add(counts)


def _run(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
    """delta_run of a prompt."""
    s, *window, channels, rows, lens = arguments[:KEPT]
    q, *tokens = arguments[KEPT:]
    counts = jnp.full_like(rows, q.shape[1])
    states = RowStates(s, Tokens(*window), rows, lens[rows])
    out, s = delta_run(states, counts, q, Tokens(*tokens), implementation)
    return out, s, *window, channels, _next(rows, s), lens


def _feed(arguments: Arguments, output: tuple[Array, ...]) -> Arguments:
    """The next call's arguments: what was handed on, and queries that depend on the output."""
    (out, *kept), q = output, arguments[KEPT]
    assert q is not None
    return *kept, q + SMALL * out[:, :, :, 0, :1], *arguments[KEPT + 1 :]


def _next(rows: Array, s: Array) -> Array:
    return (rows + len(rows)) % len(s)
