"""Plain decoding: a drafter that proposes nothing."""

from jaxspec.models.decoder import Decoder
from jaxspec.pytree import pytree
from jaxspec.speculation.call import Call
from jaxspec.speculation.drafters.base import DraftState, StatelessDrafter, unchanged
from jaxspec.speculation.tree import DraftTree, root_only
from jaxspec.state import EngineState


@pytree
class NoDrafter(StatelessDrafter):
    """Every round verifies only the root and commits one token."""

    def propose(
        self, target: Decoder, state: EngineState, call: Call
    ) -> tuple[DraftTree, DraftState]:
        return root_only(state.rows.roots), unchanged(state)
