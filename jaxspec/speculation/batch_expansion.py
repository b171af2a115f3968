"""A slow scorer of draft trees without tree attention: the specification of round.verify.

Every node's path from the root is scored as a plain sequence of its own, prefix included.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.speculation.acceptance import path_to
from jaxspec.speculation.tree import DraftTree
from jaxspec.state import EngineState


def score_by_batch_expansion(target: Decoder, state: EngineState, tree: DraftTree) -> Array:
    """Target logits at every node, [B, N, V / shards], without reading any cache.

    Computes N forward passes over whole sequences, one after the other. The logits of padding nodes
    are those of the root.
    """
    batch, size = tree.tokens.shape
    row = jnp.arange(batch)[:, None]
    beyond = jnp.zeros((batch, tree.max_depth), jnp.int32)
    prefix = jnp.concatenate([state.rows.tokens, beyond], axis=1)  # [B, S]
    positions = jnp.broadcast_to(jnp.arange(prefix.shape[1]), prefix.shape)

    def score(node: Array) -> Array:
        node = jnp.where(node < tree.num_nodes, node, 0)  # [B]
        path, depth = path_to(tree, node)
        # Past its depth a path repeats the root, in places that come after the node: unseen.
        place = state.rows.context_lens[:, None] + jnp.arange(path.shape[1])
        sequence = prefix.at[row, place].set(jnp.take_along_axis(tree.tokens, path, axis=1))
        hidden, _, _ = decoder.run(
            target, sequence, positions, target.no_states(), dense_causal_attend
        )
        last = (state.rows.context_lens + depth)[:, None, None]
        return decoder.logits(target, jnp.take_along_axis(hidden, last, axis=1))[:, 0]

    return jax.lax.map(score, jnp.arange(size)).swapaxes(0, 1)
