"""The gated delta rule, token by token, with a state per node: the definition, not the fast way.

jaxspec/cache/delta_rule.py computes the same in chunks, which is what runs without a kernel.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_rule.tokens import LayerRows, RowStates, Tokens


def delta_read_reference(
    states: RowStates,
    q: Array,
    nodes: Tokens,
    ancestors: Array,
    depth: Array,
) -> Array:
    """See pallas_kernels.delta_rule.delta_read."""
    s, window, rows, held = states
    windows = Tokens(*(x[rows] for x in window))
    before = _after_window(s[rows], windows, held)
    parent = ancestors & (depth[:, None, :] == depth[..., None] - 1)  # [B, N, N]
    above = jnp.where(parent.any(-1), 1 + jnp.argmax(parent, axis=-1), 0)  # [B, N] of ``per_node``
    batch, size = jnp.arange(len(rows)), q.shape[1]

    def step(per_node: Array, node: Array) -> tuple[Array, Array]:
        state = _applied(per_node[above[:, node], batch], nodes, node)
        return per_node.at[1 + node].set(state), _einsum("bgd,bgred->bgre", q[:, node], state)

    per_node = jnp.zeros((1 + size, *before.shape), before.dtype).at[0].set(before)
    _, out = lax.scan(step, per_node, jnp.arange(size))
    return jnp.moveaxis(out, 0, 1)


def delta_run_reference(
    states: RowStates,
    counts: Array,
    q: Array,
    tokens: Tokens,
) -> tuple[Array, Array]:
    """See pallas_kernels.delta_rule.delta_run."""
    s, window, rows, held = states
    capacity = window.k.shape[1]
    windows, kept = Tokens(*(x[rows] for x in window)), s[rows]
    state = _after_window(kept, windows, held)

    def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], Array]:
        state, kept = carry
        valid = index < counts
        state = _where(valid, _applied(state, tokens, index), state)
        kept = _where(valid & ((held + index + 1) % capacity == 0), state, kept)
        out = _einsum("bgd,bgred->bgre", q[:, index], state)
        return (state, kept), _where(valid, out, jnp.zeros_like(out))

    (_, kept), out = lax.scan(step, (state, kept), jnp.arange(q.shape[1]))
    target = jnp.where(counts > 0, rows, len(s))
    return jnp.moveaxis(out, 0, 1), s.at[target].set(kept, mode="drop")


def delta_commit_reference(
    layer: LayerRows,
    rows: Array,
    held: Array,
    path: Array,
    counts: Array,
) -> tuple[Array, Tokens, Array]:
    """See pallas_kernels.delta_rule.delta_commit, of which this is a layer."""
    s, window, channels, nodes, node_channels = layer
    capacity, batch = window.k.shape[1], jnp.arange(len(rows))
    windows, state, last = Tokens(*(x[rows] for x in window)), s[rows], channels[rows]
    for index in range(path.shape[1]):
        valid, node = index < counts, path[:, index]
        place = (held + index) % capacity
        windows = Tokens(
            *(
                x.at[batch, place].set(_where(valid, new[batch, node], x[batch, place]))
                for x, new in zip(windows, nodes, strict=True)
            )
        )
        folded = _after_window(state, windows, jnp.full_like(held, capacity))
        state = _where(valid & (place == capacity - 1), folded, state)
        taken = node_channels[batch, node][:, None, :, : last.shape[-1]]
        moved = jnp.concatenate([last[:, 1:], taken], axis=1)
        last = _where(valid, moved.astype(last.dtype), last)
    target = jnp.where(counts > 0, rows, len(s))

    def put(x: Array, entries: Array) -> Array:
        return x.at[target].set(entries, mode="drop")

    return put(s, state), Tokens(*map(put, window, windows)), put(channels, last)


def _after_window(state: Array, window: Tokens, held: Array) -> Array:
    """The state [B, G, r, Dv, Dk] after the first ``held`` [B] tokens of windows [B, C, ...]."""

    def step(place: Array, state: Array) -> Array:
        return _where(place < held, _applied(state, window, place), state)

    return lax.fori_loop(0, window.k.shape[1], step, state)


def _applied(state: Array, tokens: Tokens, place: int | Array) -> Array:
    """The state [B, G, r, Dv, Dk] after the tokens at a place."""
    k, v, g, beta = (x[:, place] for x in tokens)
    state = jnp.exp(g)[..., None, None] * state
    written = beta[..., None] * (v - _einsum("bgd,bgred->bgre", k, state))
    return state + written[..., None] * k[:, :, None, None, :]


def _where(chosen: Array, x: Array, other: Array) -> Array:
    """x [B, ...] where chosen [B], else other."""
    return jnp.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), x, other)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
