"""Tokens of a delta rule whose decay differs by channel of the key (Kimi Linear, arXiv 2510.26692).

In the notation of delta_rule, with one value head for each key head and a decay g [Dk]:

    S <- diag(exp(g)) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

Let G_i be the sum of g over token i and those before it, or over node i and its ancestors. What
token i reads of what token j wrote is weighted by sum_c k_ic k_jc exp(G_ic - G_jc). Differences
come first: they are at most 0, while exp(-G_j) alone overflows.

An invalid token changes nothing, whatever its inputs are: it is selected away.
"""

from typing import Self

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache.delta_rule import DeltaInputs, by_chunks, differentiable_inverse, einsum
from jaxspec.parallel.pytree import array, pytree
from pallas_kernels.delta_rule.tokens import take_tokens

LONGEST_CHUNK = 16  # of ``sequences``: C * C * Dk numbers of each head are in memory


@pytree
class ChannelInputs(DeltaInputs):
    """What tokens do to the state. There is one value head a group: r is 1."""

    g: Array = array("batch", "length", "kv_heads", "head_dim")  # [B, T, G, Dk], at most 0

    has_kernels = False

    @classmethod
    def decay_shape(cls, values: int, k_dim: int) -> tuple[int, ...]:
        """One a channel of the key."""
        return (k_dim,)

    def fold(self, s: Array) -> Array:
        """The state [B, G, 1, Dv, Dk] after these consecutive tokens."""
        s, tokens = lax.optimization_barrier((s, self))
        writes, log_decay = _writes(s, tokens)
        return lax.optimization_barrier(_after(s, tokens, writes, log_decay))

    def chunk(self, s: Array, q: Array) -> tuple[Array, Array]:
        """Outputs [B, C, G, 1, Dv] of these consecutive tokens with queries [B, C, G, Dk], and the
        state after them, the same as fold's."""
        s, tokens = lax.optimization_barrier((s, self))
        writes, log_decay = _writes(s, tokens)
        after = lax.optimization_barrier(_after(s, tokens, writes, log_decay))
        return _outputs(s, q, tokens, writes, log_decay), after

    def tree(self, s: Array, q: Array, nodes: Self, ancestors: Array, depth: Array) -> Array:
        """Outputs [B, N, G, 1, Dv] of all nodes of a tree, each after its own ancestors and itself.

        As in delta_rule.tree it is what keys and queries read from the states that is computed,
        over depths, for all nodes at once. A node's own decays come first, so that nothing else
        changes what it has read. Every step depends on the node's own path alone, in its order.

        Args:
          s: the state before these tokens, which come before the tree.
          q: [B, N, G, Dk].
          ancestors: bool [B, N, N], whether node j is node i or one of its ancestors.
          depth: int32 [B, N], of a root 0.
        """
        last = jnp.max(depth) + 1

        def at_level(level: Array) -> tuple[Array, Array]:
            """The ancestor [B, N] of each node at a depth, and whether it has one [B, N]."""
            found = ancestors & (depth == level)[:, None, :]
            return jnp.argmax(found, axis=-1), jnp.any(found, axis=-1)

        def decay(level: Array, total: Array) -> Array:
            node, reached = at_level(level)
            return jnp.where(reached[..., None, None], total + take_tokens(nodes.g, node), total)

        total = lax.fori_loop(0, last, decay, jnp.zeros_like(nodes.g))  # G [B, N, G, Dk]
        readers = jnp.stack([nodes.k, q], axis=1)  # [B, 2, N, G, Dk]
        read = self._read_after(s, readers * jnp.exp(total)[:, None])  # [B, 2, N, G, Dv]
        values, beta = nodes.v[..., 0, :], nodes.beta  # [B, N, G, Dv], [B, N, G, 1]

        def step(level: Array, read: Array) -> Array:
            node, reached = at_level(level)
            since = jnp.exp(
                jnp.where(reached[..., None, None], total - take_tokens(total, node), 0)
            )
            product = jnp.sum(readers * (take_tokens(nodes.k, node) * since)[:, None], axis=-1)
            written = take_tokens(beta * (values - read[:, 0]), node)
            after = read + product[..., None] * written[:, None]
            return jnp.where(reached[:, None, :, None, None], after, read)

        read = lax.fori_loop(0, last, step, read)
        return read[:, 1, :, :, None]

    def sequences(self, q: Array) -> Array:
        """Outputs [B, T, G, 1, Dv] of whole sequences with queries [B, T, G, Dk]: see by_chunks."""

        def step(s: Array, part: tuple[Array, ChannelInputs]) -> tuple[Array, Array]:
            queries, tokens = part
            writes, log_decay = _writes(s, tokens)
            out = _outputs(s, queries, tokens, writes, log_decay)
            return _after(s, tokens, writes, log_decay), out

        return by_chunks(step, q, self, LONGEST_CHUNK)

    def _read_after(self, s: Array, readers: Array) -> Array:
        """What readers [B, 2, N, G, Dk] read after these tokens: [B, 2, N, G, Dv]."""
        s, tokens = lax.optimization_barrier((s, self))
        writes, log_decay = lax.optimization_barrier(_writes(s, tokens))
        total = log_decay[:, :, -1:]
        kept = tokens.k.transpose(0, 2, 1, 3) * jnp.exp(total - log_decay)  # [B, G, C, Dk]
        scores = einsum("bxngd,bgcd->bxngc", readers, kept)
        from_s = einsum(
            "bxngd,bged->bxnge", readers * jnp.exp(total[:, :, 0])[:, None, None], s[:, :, 0]
        )
        return from_s + einsum("bxngc,bgce->bxnge", scores, writes)


def _writes(s: Array, tokens: ChannelInputs) -> tuple[Array, Array]:
    """What each of C consecutive tokens writes after S, d [B, G, C, Dv], and log decays
    [B, G, C, Dk] since S. A triangular system, as in DeltaInputs.in_chunk."""
    log_decay = jnp.cumsum(tokens.g, axis=1).transpose(0, 2, 1, 3)
    k, beta = tokens.k.transpose(0, 2, 1, 3), tokens.beta[..., 0].transpose(0, 2, 1)[..., None]
    before = jnp.tri(k.shape[2], k=-1, dtype=bool)
    system = beta * _scores(k, k, log_decay, before)
    from_s = einsum("bgcd,bged->bgce", k * jnp.exp(log_decay), s[:, :, 0])
    wanted = beta * (tokens.v[..., 0, :].transpose(0, 2, 1, 3) - from_s)
    return einsum("bgij,bgje->bgie", differentiable_inverse(system), wanted), log_decay


def _outputs(s: Array, q: Array, tokens: ChannelInputs, writes: Array, log_decay: Array) -> Array:
    """Outputs [B, C, G, 1, Dv] of consecutive tokens with queries [B, C, G, Dk]."""
    k, q = tokens.k.transpose(0, 2, 1, 3), q.transpose(0, 2, 1, 3)
    scores = _scores(q, k, log_decay, jnp.tri(k.shape[2], dtype=bool))
    out = einsum("bgcd,bged->bgce", q * jnp.exp(log_decay), s[:, :, 0])
    out = out + einsum("bgij,bgje->bgie", scores, writes)
    return out.transpose(0, 2, 1, 3)[..., None, :]


def _after(s: Array, tokens: ChannelInputs, writes: Array, log_decay: Array) -> Array:
    """The state after consecutive tokens."""
    total = log_decay[:, :, -1:]
    kept = tokens.k.transpose(0, 2, 1, 3) * jnp.exp(total - log_decay)
    added = einsum("bgcd,bgce->bged", kept, writes)[:, :, None]
    return jnp.exp(total)[:, :, :, None] * s + added


def _scores(readers: Array, k: Array, log_decay: Array, seen: Array) -> Array:
    """What readers [B, G, C, Dk] of tokens i read at keys k of tokens j, each channel decayed from
    j to i; 0 where j is not ``seen`` [C, C] by i: [B, G, C, C]."""
    difference = log_decay[:, :, :, None] - log_decay[:, :, None]
    decays = jnp.exp(jnp.where(seen[..., None], difference, 0))
    products = jnp.sum(readers[:, :, :, None] * k[:, :, None] * decays, axis=-1)
    return jnp.where(seen, products, 0)
