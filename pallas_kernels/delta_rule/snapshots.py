"""A round with a state per node, as engines do that roll back: only to be timed beside delta_read
and delta_commit, which keep none.

Each node's state is its parent's, decayed and updated; the accepted node's state is kept. All nodes
of a level of the tree are computed at once.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_rule.tokens import Tokens


def snapshot_round(
    s: Array,
    rows: Array,
    q: Array,
    nodes: Tokens,
    parents: Array,
    path: Array,
    counts: Array,
    levels: Sequence[int],
) -> tuple[Array, Array]:
    """Outputs of a tree's nodes, and the states after the accepted ones.

    Inputs of the convolution are not moved here, as ``delta_commit`` does.

    Args:
      s: float32 [R, G, r, Dv, Dk], states after all committed tokens.
      rows: int32 [B], each sequence's entry of s. No two are the same.
      q: float32 [B, N, G, Dk], queries.
      nodes: [B, N, ...], sorted by depth.
      parents: int32 [B, N], of nodes past the first level.
      path: int32 [B, A], accepted nodes by depth.
      counts: int32 [B], how many of them, at least 1.
      levels: nodes of each depth, the same in all sequences; N together.

    Returns float32 [B, N, G, r, Dv] and s.
    """
    batch, last = jnp.arange(len(rows)), counts - 1
    outputs, first, above = [], 0, 0
    states, kept = s[rows][:, None], s[rows]  # [B, n, G, r, Dv, Dk], [B, G, r, Dv, Dk]
    for level, size in enumerate(levels):
        level_nodes = slice(first, first + size)
        if level > 0:
            states = states[batch[:, None], parents[:, level_nodes] - above]
        out, states = _level(states, q[:, level_nodes], Tokens(*(x[:, level_nodes] for x in nodes)))
        if len(levels) > 1:
            states = lax.optimization_barrier(states)  # in memory, not computed where it is read
        outputs.append(out)
        # The others read the first sequence's, which then is in the cache.
        here = last == level
        chosen = states[jnp.where(here, batch, 0), jnp.where(here, path[:, level] - first, 0)]
        kept = jnp.where(here[:, None, None, None, None], chosen, kept)
        first, above = first + size, first
    return jnp.concatenate(outputs, axis=1), s.at[rows].set(kept)


def _level(before: Array, q: Array, nodes: Tokens) -> tuple[Array, Array]:
    """Outputs [B, n, G, r, Dv] and states of nodes, from their parents' [B, n, G, r, Dv, Dk].

    Keys and queries read the parent's state, so that it crosses memory twice and the new one once.
    """
    decay = jnp.exp(nodes.g)[..., None]
    keys, queries = (x[:, :, :, None, None, :] for x in (nodes.k, q))
    by_key, by_query = (jnp.sum(before * x, axis=-1) for x in (keys, queries))
    written = nodes.beta[..., None] * (nodes.v - decay * by_key)
    product = jnp.sum(q * nodes.k, axis=-1)[..., None, None]
    after = decay[..., None] * before + written[..., None] * keys
    return decay * by_query + product * written, after
