"""Growing a chain only while it is likely to be accepted, as a loop.

Each step of a draft model takes time, and one after a draft that is unlikely is nearly never
accepted. The step is compiled once, where grow.grow compiles one for each depth.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.decoding.trees.grow import Beams, Proposer, Step
from jaxspec.decoding.trees.tree import DraftTree, make_chain, pack_constant


class _Growing(NamedTuple):
    """A chain, of which ``depth`` tokens are drafted so far."""

    tokens: Array  # int32 [B, 1 + max_depth]
    depth: Array  # int32 []
    probability: Array  # float32 [B, 1], of all of a row's draft
    goes_on: Array  # bool []
    carry: Any


def grow_while_likely(
    proposer: Proposer,
    roots: Array,
    root_logits: Array,
    step: Step,
    carry: Any,
    wanted: Array,
    least_probability: float,
) -> tuple[DraftTree, Any]:
    """Draft a chain below each root, and stop when no row's draft is likely any more.

    All rows draft equally many tokens, at least one and at most ``max_depth``. A draft is as likely
    as the product of its tokens' probabilities in the drafter's processed logits. After each
    token drafting goes on if some ``wanted`` row's whole draft is at least ``least_probability``
    likely. The tokens are the first ones of the chain that grow.grow would draft.

    The acceptance rule must be ``match``: with another one a row's text would depend on where other
    rows end the chain.

    Args:
      proposer: chooses tokens. Its speculation is a chain.
      roots: int32 [B], the last committed token of each row.
      root_logits: [B, W / shards], draft logits after the roots.
      step: runs one level, here the token drafted last: Beams of [B, 1] -> (logits
        [B, 1, W / shards], carry). It is called once for each token but the last.
      carry: what ``step`` threads through.
      wanted: bool [B], the rows whose drafts will be used.
      least_probability: above 0.

    Returns:
      The chain, with arrays [B, 1 + max_depth] and equal ``num_nodes`` [B], the root included; and
      the last carry. Nodes past ``num_nodes`` have the roots' tokens.
    """
    depths, batch_axes = proposer.speculation.max_depth, proposer.target_layout.batch
    nodes = np.tri(depths, -(-depths // 32) * 32, dtype=bool)  # scratch nodes that each one sees
    seen = jnp.asarray(pack_constant(nodes))

    def with_token(chain: _Growing, logits: Array, carry: Any) -> _Growing:
        depth = chain.depth + 1
        token, probability = proposer.likely_token(logits, depth)
        probability = chain.probability * probability
        goes_on = jnp.any(probability >= least_probability)
        if batch_axes:  # a step may move data between devices: all run as many
            goes_on = lax.pmax(goes_on.astype(jnp.int32), batch_axes) > 0
        tokens = lax.dynamic_update_slice_in_dim(chain.tokens, token, depth, axis=1)
        return _Growing(tokens, depth, probability, goes_on & (depth < depths), carry)

    def body(chain: _Growing) -> _Growing:
        node = chain.depth - 1
        token = lax.dynamic_slice_in_dim(chain.tokens, chain.depth, 1, axis=1)
        ancestors = jnp.broadcast_to(seen[node], (*token.shape, seen.shape[1]))
        beam = Beams(token, jnp.zeros_like(token), chain.depth, node, ancestors)
        return with_token(chain, *step(beam, chain.carry))

    tokens = jnp.pad(roots[:, None], ((0, 0), (0, depths)))
    certain = wanted[:, None].astype(jnp.float32)
    start = _Growing(tokens, jnp.int32(0), certain, jnp.bool_(True), carry)
    first = with_token(start, root_logits[:, None], carry)
    chain = lax.while_loop(lambda chain: chain.goes_on, body, first)
    return make_chain(chain.tokens, jnp.broadcast_to(chain.depth + 1, roots.shape)), chain.carry
