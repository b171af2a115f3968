"""A drafter that leaves the tokens of its chains to the host."""

import jax.numpy as jnp

from jaxspec.decoding.drafters.base import Proposed, StatelessDrafter, unchanged
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import make_chain
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import pytree


@pytree
class HostDrafted(StatelessDrafter):
    """Proposes chains of the root alone, as wide as the call's.

    An engine with a host drafter (engine.host_drafter) writes tokens into them between the two
    halves of a round. Where nothing does, a round is one of plain decoding.
    """

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        roots = state.rows.roots
        tokens = jnp.repeat(roots[:, None], options.speculation.max_depth + 1, axis=1)
        return make_chain(tokens, jnp.ones_like(roots)), unchanged(state)
