"""Block heads as drafters: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Slot ``i`` of the cache holds the head's keys and values of committed token ``i``, made from the
target's hidden states, which are known once the target has verified the token. Those of a round's
tokens wait for the next round: its pass writes them beside a block, so weights are read once. The
block uses the slots past the context as scratch.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, ModelState, page_slots
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters.base import (
    DraftState,
    PendingRows,
    PrefillChunk,
    Proposed,
)
from jaxspec.decoding.drafters.paged import (
    KeepsFeatures,
    entry_at,
    make_proposer,
    prompt_tokens,
)
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.grow import Beams, Proposer, grow, of_parents
from jaxspec.decoding.trees.lattice import lattice_tree, pair_tree
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.decoding.trees.worth_verifying import NodeCosts, cut, worth_verifying
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead
from jaxspec.models.heads.block_context import BlockAttend, Causality, Context
from jaxspec.models.heads.corrections import Block, PairCorrection, lattice_of
from jaxspec.models.linear import ReadsRounded
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.parallel.pytree import Pytree, array, pytree, static

# Tokens of blocks and their context that one product takes: more take as long as two products. Of
# weights that round their rows fewer: with 8 bits their kernel takes 64 rows, and with 4 bits more
# were not timed.
MOST_BESIDE, MOST_ROUNDED_BESIDE = 128, 64


@pytree
class BlockRows(PendingRows):
    """``pending``: number of tokens of each row's context whose keys and values are not written
    yet, the last ones. ``features[:, t]`` is the captured state of the ``t``-th of them. Where none
    is pending, ``features[:, 0]`` is that of the context's last token, if the head reads it."""

    features: Array = array("batch", "depth", "features")  # [R, A, C]

    def left(self, most: int) -> Array:
        return most - 1 - self.pending  # the root is not among them


@pytree
class BlockDrafter(KeepsFeatures, Pytree):
    """Drafts a chain or a tree from one pass of a block head.

    A call whose trees are less deep than a block runs a shorter one, with fewer masks. A tree holds
    the likeliest paths; with a correction, the likeliest of those that ``top_k`` beams find.

    Attributes:
      costs: of the tokens that are verified. A chain then ends where its confidence head does not
        hold the next token for worth its cost. None: chains are whole.
    """

    head: BlockHead
    costs: NodeCosts | None = static(default=None)

    @property
    def capture(self) -> tuple[int, ...]:
        return self.head.capture

    @property
    def tells_confidence(self) -> bool:
        return self.head.confidence is not None

    def init_pool(self, geometry: Geometry) -> ModelState:
        return self.head.init_state(geometry)

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> BlockRows:
        """Raises ValueError for trees deeper than a block."""
        self.head.check_depth(capacity.max_depth)
        width = target.config.hidden_size * len(self.capture)
        shape = num_rows, capacity.max_depth + 1, width
        return BlockRows(
            features=jnp.zeros(shape, self.head.dtype), pending=jnp.zeros(num_rows, jnp.int32)
        )

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        return capacity.max_depth + 2  # the root included, which is written as context afterwards

    def catch_up(self, target: Decoder, state: EngineState, options: RoundOptions) -> DraftState:
        pool, rows = _draft_state(state)
        context = self._pending(state, rows.features.shape[1], options)
        layers = self.head.write_context(context, pool.layers, options.kernels)
        rows = self._keeping_last(rows, rows.features, rows.pending - 1, state.rows.active)
        pending = jnp.where(state.rows.active, 0, rows.pending)
        return DraftState(pool=pool.replace(layers=layers), rows=rows.replace(pending=pending))

    def _keeping_last(
        self, rows: BlockRows, features: Array, last: Array, changed: Array
    ) -> BlockRows:
        """The rows with the captured state of the context's last token: features [R, T, C] at
        ``last`` [R], in the rows ``changed`` [R]."""
        if not self.head.reads_context:
            return rows
        new = entry_at(features, last).astype(rows.features.dtype)
        kept = jnp.where(changed[:, None], new, rows.features[:, 0])
        return rows.replace(features=rows.features.at[:, 0].set(kept))

    def _pending(self, state: EngineState, width: int, options: RoundOptions) -> Context:
        """The pending tokens of each row, up to ``width``."""
        _, rows = _draft_state(state)
        offset = jnp.arange(width)
        positions = (state.rows.context_lens - rows.pending)[:, None] + offset
        valid = (offset < rows.pending[:, None]) & state.rows.active[:, None]
        return self._context(state, rows.features[:, :width], positions, valid, options)

    def _context(
        self,
        state: EngineState,
        features: Array,
        positions: Array,
        written: Array,
        options: RoundOptions,
    ) -> Context:
        """Tokens [B, T] at ``positions``, from the target's hidden states."""
        table, page_size = state.rows.page_table, state.pool.page_size
        return Context(
            fused=self.head.fused(features, options.kernels),
            positions=positions,
            slots=page_slots(table, positions, written, page_size),
        )

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        options: RoundOptions,
    ) -> DraftState:
        assert features is not None
        pool, rows = _draft_state(state)  # rows whose prompt is being read have nothing pending
        run = prompt_tokens(state, chunk.tokens, chunk.counts)
        context = self._context(state, features, run.positions, run.written, options)
        layers = self.head.write_context(context, pool.layers, options.kernels)
        rows = self._keeping_last(rows, features, chunk.counts - 1, chunk.counts > 0)
        return DraftState(pool=pool.replace(layers=layers), rows=rows)

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        head, roots, (pool, rows) = self.head, state.rows.roots, _draft_state(state)
        block = head.block(roots, options.speculation.max_depth)
        context = self._pending(state, options.speculation.max_depth + 1, options)
        attend = block_attend(state, block.shape[1], head.causal)
        layers = pool.layers
        if self._reads_beside(block.size + context.slots.size):
            normed, layers = head.outputs_beside(
                target, block, context, layers, attend, options.kernels
            )
        else:
            layers = head.write_context(context, layers, options.kernels)
            normed, layers = head.all_outputs(
                target, block, attend.positions, layers, attend, options.kernels
            )
        outputs = head.drafted(normed)
        logits = head.logits(target, outputs, options.kernels)
        layout = head.vocab_layout(target)
        proposer = make_proposer(target, state, options, layout, head.token_ids)
        read = Block(outputs, logits)
        if head.reads_context:
            read = read._replace(context=entry_at(context.fused, rows.pending - 1))
        if head.reads_root:
            before = jnp.maximum(state.rows.context_lens - 1, 0)[:, None]
            before = jnp.take_along_axis(state.rows.tokens, before, axis=1)[:, 0]
            read = read._replace(root_output=normed[:, 0], before=before)
        tree = self._tree(target, proposer, roots, read)
        if tree.is_chain and (options.confidence or self.costs is not None):
            confidence = head.confidence_of(outputs, tree.tokens[:, :-1])
            if self.costs is not None:
                growth = self.costs.growth(*confidence.shape)
                tree = cut(tree, worth_verifying(confidence, growth))
            if options.confidence:
                tree = tree.replace(confidence=confidence)
        return tree, DraftState(pool=pool.replace(layers=layers), rows=rows)

    def _reads_beside(self, tokens: int) -> bool:
        """Whether one pass reads so many tokens of blocks and their context."""
        reader = self.head.layers[0].reader
        rounds = isinstance(reader, ReadsRounded) and reader.rounds
        return tokens <= (MOST_ROUNDED_BESIDE if rounds else MOST_BESIDE)

    def _tree(self, target: Decoder, proposer: Proposer, roots: Array, block: Block) -> DraftTree:
        correction = self.head.correction
        if correction is None:
            return lattice_tree(proposer, roots, block.logits)
        if isinstance(correction, PairCorrection):
            kernels = proposer.options.kernels
            ranked = proposer.ranked(block.logits, 1 + jnp.arange(block.logits.shape[1]))
            lattice = lattice_of(block, correction, target.layout, kernels, ranked)
            return pair_tree(proposer, roots, correction.scores(target, lattice, roots))

        def step(beams: Beams, carry: Any) -> tuple[Array, Any]:
            carry = of_parents(beams, carry)
            return correction.step(target, block, beams.tokens, beams.depth, carry)

        logits, carry = correction.step(target, block, roots[:, None], 0, correction.start(block))
        return grow(proposer, roots, logits[:, 0], step, carry)[0]


def with_costs_of[T](current: T, new: T) -> T:
    """``new``, whose block drafters verify by the costs of those of ``current``: they are of the
    target and the device, not of the drafter's weights."""
    remaining = iter(nodes_of(current, BlockDrafter))

    def costed(drafter: BlockDrafter) -> BlockDrafter:
        old = next(remaining, None)
        return drafter if old is None else drafter.replace(costs=old.costs)

    return map_nodes(new, costed, BlockDrafter)


def _draft_state(state: EngineState) -> tuple[ModelState, BlockRows]:
    return state.pool.draft, state.rows.draft


def block_attend(state: EngineState, width: int, causal: Causality) -> BlockAttend:
    """Attention of a block of ``width`` tokens, the root first: they see the context, and the block
    as ``causal`` says."""
    rows = state.rows
    positions = rows.context_lens[:, None] + jnp.arange(width)
    active = jnp.broadcast_to(rows.active[:, None], positions.shape)
    paged = PagedAttend(
        rows=rows.index,
        page_table=rows.page_table,
        context_lens=rows.context_lens,
        slots=page_slots(rows.page_table, positions, active, state.pool.page_size),
        positions=positions,
        kv_lens=rows.context_lens + width,
    )
    return BlockAttend(paged=paged, causal=causal)
