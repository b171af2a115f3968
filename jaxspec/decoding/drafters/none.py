"""Plain decoding: a drafter that proposes nothing."""

from jaxspec.decoding.drafters.base import Proposed, StatelessDrafter, unchanged
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import root_only
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import pytree


@pytree
class NoDrafter(StatelessDrafter):
    """Every round verifies only the root and commits one token."""

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        return root_only(state.rows.roots), unchanged(state)
