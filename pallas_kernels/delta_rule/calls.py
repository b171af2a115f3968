"""Calls of delta_rule as benchmarks chain them: each takes the rows after those of the one before.

Their arguments are those of ``round_arguments`` or ``run_arguments`` in cases.py.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.benchmark import Arguments
from pallas_kernels.delta_rule import delta_commit, delta_read, delta_run
from pallas_kernels.delta_rule.tokens import RowStates, Tokens
from pallas_kernels.selection import Implementation

KEPT = 8  # arguments that a round hands to the next: states, windows, channels, rows, lengths
SMALL = 1e-12  # share of an output that the next queries get


def read(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
    """delta_read; nothing is committed."""
    s, *window, channels, rows, lens = arguments[:KEPT]
    q, *nodes, _, ancestors, depth, _, _ = arguments[KEPT:]
    held = lens[rows] % window[0].shape[1]
    states = RowStates(s, Tokens(*window), rows, held)
    out = delta_read(states, q, Tokens(*nodes), ancestors, depth, implementation)
    return out, s, *window, channels, _next(rows, s), lens


def whole_round(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
    """delta_read, then delta_commit."""
    out, s, *window, channels, following, lens = read(*arguments, implementation=implementation)
    rows = arguments[KEPT - 2]
    _, *nodes, new, _, _, path, counts = arguments[KEPT:]
    out, path = lax.optimization_barrier((out, path))  # what is accepted depends on what was read
    held = lens[rows] % window[0].shape[1]
    s, after, channels = delta_commit(
        RowStates(s, Tokens(*window), rows, held),
        *(channels, Tokens(*nodes), new, path, counts, implementation),
    )
    return out, s, *after, channels, following, lens.at[rows].add(counts)


def run(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
    """delta_run of a prompt."""
    s, *window, channels, rows, lens = arguments[:KEPT]
    q, *tokens = arguments[KEPT:]
    counts = jnp.full_like(rows, q.shape[1])
    states = RowStates(s, Tokens(*window), rows, lens[rows])
    out, s = delta_run(states, counts, q, Tokens(*tokens), implementation)
    return out, s, *window, channels, _next(rows, s), lens


def feed(arguments: Arguments, output: tuple[Array, ...]) -> Arguments:
    """The next call's arguments: what was handed on, and queries that depend on the output."""
    (out, *kept), q = output, arguments[KEPT]
    assert q is not None
    return *kept, q + SMALL * out[:, :, :, 0, :1], *arguments[KEPT + 1 :]


def _next(rows: Array, s: Array) -> Array:
    return (rows + len(rows)) % len(s)
