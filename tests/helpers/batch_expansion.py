"""A slow scorer of draft trees without tree attention: the specification of round.verify.

The path from the root to each node is scored as a separate plain sequence, prefix included.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree, path_to
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder


def score_by_batch_expansion(target: Decoder, state: EngineState, tree: DraftTree) -> Array:
    """Target logits at every node, [B, N, V / shards], computed without a cache.

    Runs N forward passes over whole sequences, one after the other. Padding nodes get the logits of
    the root.
    """
    batch, size = tree.tokens.shape
    row = jnp.arange(batch)[:, None]
    beyond = jnp.zeros((batch, tree.max_depth), jnp.int32)
    prefix = jnp.concatenate([state.rows.tokens, beyond], axis=1)  # [B, S]
    positions = jnp.broadcast_to(jnp.arange(prefix.shape[1]), prefix.shape)

    def score(node: Array) -> Array:
        node = jnp.where(node < tree.num_nodes, node, 0)  # [B]
        path, depth = path_to(tree, node)
        # Past its depth a path repeats the root. Those positions come after the node, so the node
        # does not see them.
        place = state.rows.context_lens[:, None] + jnp.arange(path.shape[1])
        sequence = prefix.at[row, place].set(jnp.take_along_axis(tree.tokens, path, axis=1))
        hidden, _, _ = decoder.run(
            target, sequence, positions, target.no_states(), dense_causal_attend
        )
        last = (state.rows.context_lens + depth)[:, None, None]
        return decoder.logits(target, jnp.take_along_axis(hidden, last, axis=1))[:, 0]

    return jax.lax.map(score, jnp.arange(size)).swapaxes(0, 1)
