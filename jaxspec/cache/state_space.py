"""Tokens of a state space layer (Mamba-2), which add to the state of a gated delta rule.

In the notation of delta_rule: a token with query q, key k, value v, log of the decay g and strength
beta changes the state, then reads it:

    S <- exp(g) S + k (beta v)^T;  o = S^T q

The value is written as it is, where the delta rule writes what the state lacks of it. So everything
that is said there holds, of chunks, windows and trees; only no system of equations is solved.
"""

import jax.numpy as jnp
from jax import Array

from jaxspec.cache.delta_rule import DeltaInputs, by_chunks, decays, einsum
from jaxspec.parallel.pytree import pytree


@pytree
class SumInputs(DeltaInputs):
    """What tokens do to the state. Keys are of any length."""

    has_kernels = False

    def in_chunk(self, s: Array, log_decay: Array) -> Array:
        """What each of C consecutive tokens writes: [B, G, r, C, Dv]."""
        return self.beta.transpose(0, 2, 3, 1)[..., None] * self.v.transpose(0, 2, 3, 1, 4)

    def in_tree(self, held: Array) -> Array:
        """What each of a tree's nodes writes: [B, G, r, N, Dv]."""
        return self.beta.transpose(0, 2, 3, 1)[..., None] * self.v.transpose(0, 2, 3, 1, 4)

    def sequences(self, q: Array) -> Array:
        """Outputs [B, T, G, r, Dv] of whole sequences with queries [B, T, G, Dk]: see by_chunks."""

        def step(s: Array, part: tuple[Array, SumInputs]) -> tuple[Array, Array]:
            queries, tokens = part
            log_decay = jnp.cumsum(tokens.g, axis=1).transpose(0, 2, 3, 1)  # [B, G, r, C]
            writes = tokens.in_chunk(s, log_decay)
            scores = einsum("bigd,bjgd->bgij", queries, tokens.k)[:, :, None]
            scores = scores * decays(log_decay, jnp.tri(queries.shape[1], dtype=bool))
            out = jnp.exp(log_decay)[..., None] * einsum("bigd,bgred->bgrie", queries, s)
            out = out + einsum("bgrij,bgrje->bgrie", scores, writes)
            total = log_decay[..., -1:]
            kept = jnp.exp(total - log_decay)[..., None] * writes
            after = jnp.exp(total)[..., None] * s + einsum("bjgd,bgrje->bgred", tokens.k, kept)
            return after, out.transpose(0, 3, 1, 2, 4)

        return by_chunks(step, q, self)
