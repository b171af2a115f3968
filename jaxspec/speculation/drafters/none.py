"""Plain decoding as the drafter that proposes nothing."""

from jax import Array
from jax.sharding import Mesh

from jaxspec.models.decoder import Decoder
from jaxspec.pytree import pytree
from jaxspec.speculation.drafters.base import PrefillChunk
from jaxspec.speculation.tree import DraftTree, root_only
from jaxspec.state import EngineState


@pytree
class NoDrafter:
    """Every round verifies the root alone and commits one token."""

    @property
    def capture(self) -> tuple[int, ...]:
        return ()

    @property
    def num_nodes(self) -> int:
        return 1

    @property
    def max_depth(self) -> int:
        return 0

    def init_state(self, batch: int, num_pages: int, page_size: int, mesh: Mesh | None) -> None:
        return None

    def prefill(
        self, target: Decoder, state: EngineState, chunk: PrefillChunk, features: Array | None
    ) -> None:
        return None

    def propose(self, target: Decoder, state: EngineState) -> tuple[DraftTree, None]:
        return root_only(state.roots), None

    def commit(
        self, draft: None, features: Array | None, path: Array, counts: Array, active: Array
    ) -> None:
        return None
