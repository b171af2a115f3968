"""The gated delta rule, token by token, with a state per node: the definition, not the fast way.

jaxspec/cache/delta_rule.py computes the same in chunks, which is what runs without a kernel.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_rule.tokens import Tokens


def delta_read_reference(
    s: Array,
    window: Tokens,
    rows: Array,
    held: Array,
    q: Array,
    nodes: Tokens,
    ancestors: Array,
    depth: Array,
) -> Array:
    """See pallas_kernels.delta_rule.delta_read."""
    own = Tokens(*(x[rows] for x in window))
    before = s[rows]
    for place in range(window.k.shape[1]):
        before = _where(place < held, _applied(before, own, place), before)
    states, outputs = [before], []
    for node in range(q.shape[1]):
        parent = ancestors[:, node] & (depth == depth[:, node, None] - 1)  # [B, N]
        state = before
        for other in range(node):
            state = _where(parent[:, other], states[1 + other], state)
        states.append(_applied(state, nodes, node))
        outputs.append(_einsum("bgd,bgred->bgre", q[:, node], states[-1]))
    return jnp.stack(outputs, axis=1)


def delta_run_reference(
    s: Array,
    window: Tokens,
    rows: Array,
    held: Array,
    counts: Array,
    q: Array,
    tokens: Tokens,
) -> tuple[Array, Array]:
    """See pallas_kernels.delta_rule.delta_run."""
    capacity = window.k.shape[1]
    own = Tokens(*(x[rows] for x in window))
    state = kept = s[rows]
    for place in range(capacity):
        state = _where(place < held, _applied(state, own, place), state)
    outputs = []
    for index in range(q.shape[1]):
        valid = index < counts
        state = _where(valid, _applied(state, tokens, index), state)
        kept = _where(valid & ((held + index + 1) % capacity == 0), state, kept)
        out = _einsum("bgd,bgred->bgre", q[:, index], state)
        outputs.append(_where(valid, out, jnp.zeros_like(out)))
    target = jnp.where(counts > 0, rows, len(s))
    return jnp.stack(outputs, axis=1), s.at[target].set(kept, mode="drop")


def delta_commit_reference(
    s: Array,
    window: Tokens,
    channels: Array,
    rows: Array,
    held: Array,
    nodes: Tokens,
    node_channels: Array,
    path: Array,
    counts: Array,
) -> tuple[Array, Tokens, Array]:
    """See pallas_kernels.delta_rule.delta_commit."""
    capacity, batch = window.k.shape[1], jnp.arange(len(rows))
    own, state, last = Tokens(*(x[rows] for x in window)), s[rows], channels[rows]
    for index in range(path.shape[1]):
        valid, node = index < counts, path[:, index]
        place = (held + index) % capacity
        own = Tokens(
            *(
                x.at[batch, place].set(_where(valid, new[batch, node], x[batch, place]))
                for x, new in zip(own, nodes, strict=True)
            )
        )
        folded = state
        for one in range(capacity):
            folded = _applied(folded, own, one)
        state = _where(valid & (place == capacity - 1), folded, state)
        moved = jnp.concatenate([last[:, 1:], node_channels[batch, node][:, None]], axis=1)
        last = _where(valid, moved.astype(last.dtype), last)
    target = jnp.where(counts > 0, rows, len(s))

    def put(x: Array, one: Array) -> Array:
        return x.at[target].set(one, mode="drop")

    return put(s, state), Tokens(*map(put, window, own)), put(channels, last)


def _applied(state: Array, tokens: Tokens, place: int) -> Array:
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
