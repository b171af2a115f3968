"""Block heads as drafters: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Slot ``i`` of the cache holds the head's keys and values of committed token ``i``, made from the
target's hidden states. They are known as soon as the target has verified the token, and written
then: nothing is pending, and rows keep nothing. The block of a round uses the slots past the
context as scratch.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, ModelState, page_slots
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead
from jaxspec.pytree import pytree
from jaxspec.speculation.call import Call
from jaxspec.speculation.drafters.base import DrafterDefaults, DraftState, PrefillChunk
from jaxspec.speculation.drafters.paged import make_proposer, prompt_tokens
from jaxspec.speculation.expand import Beams, Proposer, grow
from jaxspec.speculation.lattice import lattice_tree
from jaxspec.speculation.tree import DraftTree, pack_mask
from jaxspec.state import EngineState


@pytree
class BlockDrafter(DrafterDefaults):
    """Drafts a chain or a tree from one pass of a block head.

    A call whose trees are less deep than a block runs a shorter one, with fewer masks.
    """

    head: BlockHead

    @property
    def capture(self) -> tuple[int, ...]:
        return self.head.capture

    @property
    def tells_confidence(self) -> bool:
        return self.head.confidence is not None

    def init_pool(self, geometry: Geometry) -> ModelState:
        return self.head.init_state(geometry)

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> None:
        """Nothing. Raises ValueError for trees deeper than a block."""
        self.head.check_depth(capacity.max_depth)

    def reset(self, pool: ModelState, rows: Array) -> ModelState:
        return pool.reset(rows)

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        return None

    def catch_up(self, target: Decoder, state: EngineState, call: Call) -> DraftState:
        return DraftState(pool=state.pool.draft)

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        call: Call,
    ) -> DraftState:
        run = prompt_tokens(state, chunk.tokens, chunk.counts)
        return self._write(state, features, run.positions, run.written, call)

    def propose(
        self, target: Decoder, state: EngineState, call: Call
    ) -> tuple[DraftTree, DraftState]:
        head, rows, pool = self.head, state.rows, state.pool.draft
        block = head.block(rows.roots, call.speculation.max_depth)
        attend = block_attend(state, block.shape[1])
        outputs, layers = head.outputs(
            target, block, attend.positions, pool.layers, attend, call.kernels
        )
        logits = head.logits(target, outputs, call.kernels)
        proposer = make_proposer(target, state, call, target.layout)
        tree = self._tree(target, proposer, rows.roots, logits)
        if call.confidence:
            tree = tree.replace(confidence=head.confidence_of(outputs, tree.tokens[:, :-1]))
        return tree, DraftState(pool=pool.replace(layers=layers))

    def _tree(self, target: Decoder, proposer: Proposer, roots: Array, logits: Array) -> DraftTree:
        markov = self.head.markov
        if markov is None:
            return lattice_tree(proposer, roots, logits)

        def step(beams: Beams, carry: Any) -> tuple[Array, Any]:
            return logits[:, beams.depth, None] + markov(target, beams.tokens), carry

        return grow(proposer, roots, logits[:, 0] + markov(target, roots), step, None)[0]

    def commit(
        self, state: EngineState, features: Array | None, path: Array, counts: Array, call: Call
    ) -> DraftState:
        assert features is not None
        accepted = jnp.take_along_axis(features, path[..., None], axis=1)  # [B, A, C]
        depth = jnp.arange(path.shape[1])
        positions = state.rows.context_lens[:, None] + depth
        return self._write(state, accepted, positions, depth < counts[:, None], call)

    def _write(
        self, state: EngineState, features: Array | None, positions: Array, valid: Array, call: Call
    ) -> DraftState:
        """Write the context of tokens [B, T] where ``valid``."""
        assert features is not None
        pool, page_size = state.pool.draft, state.pool.page_size
        slots = page_slots(state.rows.page_table, positions, valid, page_size)
        layers = self.head.write_context(features, positions, slots, pool.layers, call.kernels)
        return DraftState(pool=pool.replace(layers=layers))


def block_attend(state: EngineState, width: int) -> PagedAttend:
    """Attention of a block of ``width`` tokens, the root first: each sees the context and the whole
    block."""
    rows = state.rows
    positions = rows.context_lens[:, None] + jnp.arange(width)
    active = jnp.broadcast_to(rows.active[:, None], positions.shape)
    return PagedAttend(
        rows=rows.index,
        page_table=rows.page_table,
        context_lens=rows.context_lens,
        slots=page_slots(rows.page_table, positions, active, state.pool.page_size),
        positions=positions,
        kv_lens=rows.context_lens + width,
        ancestors=pack_mask(jnp.ones((*positions.shape, width), bool)),
    )
