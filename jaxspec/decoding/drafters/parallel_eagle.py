"""EAGLE-3 heads that draft all tokens in one pass (P-EAGLE, arXiv 2602.01469).

Behind the root stand masks: entries of a token that is not known, with a hidden state of no token.
Each entry sees those before it, and its output drafts the token after it. Of committed tokens there
are entries as in EAGLE-3; those of masks use the slots past the root as scratch.
"""

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import LayerStates
from jaxspec.decoding.drafters.base import DraftState, Proposed
from jaxspec.decoding.drafters.eagle import FIRST_SLOT, EagleDrafter
from jaxspec.decoding.drafters.paged import TokenRun, causal_attend, make_proposer, pending_tokens
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.lattice import lattice_tree
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.head import MaskEntry
from jaxspec.parallel.pytree import pytree


@pytree
class ParallelEagleDrafter(EagleDrafter):
    """Drafts a chain or a tree from one pass of a head with a mask. The logits of a depth do not
    depend on the tokens drafted before, so a tree holds the likeliest paths."""

    def propose_for(
        self, wanted: Array, target: Decoder, state: EngineState, options: RoundOptions
    ) -> Proposed:
        head, draft = self.head, DraftState(pool=state.pool.draft, rows=state.rows.draft)
        logits, layers = self.logits(target, state, options)
        layout = head.vocab_layout(target)
        proposer = make_proposer(target, state, options, layout, head.token_ids)
        tree = lattice_tree(proposer, state.rows.roots, logits)
        return tree, draft.replace(pool=draft.pool.replace(layers=layers))

    def logits(
        self, target: Decoder, state: EngineState, options: RoundOptions
    ) -> tuple[Array, LayerStates]:
        """This shard's float32 logits of each depth after the roots [B, depth, W / shards], and the
        states with the pending tokens."""
        head, rows, depth = self.head, state.rows.draft, options.speculation.max_depth
        assert head.mask is not None
        hidden = head.hidden(rows.features[:, : depth + 1], options.kernels)
        masked = head.hidden(head.mask.hidden[None, None], options.kernels)  # [1, 1, H]
        run = with_masks(state, rows.pending, head.mask, depth)
        padding = run.tokens.shape[1] - hidden.shape[1]
        hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
        is_mask = jnp.arange(run.tokens.shape[1]) >= rows.pending[:, None]
        entry = run.tokens, jnp.where(is_mask[..., None], masked, hidden), run.positions - 1
        attend = causal_attend(state, run, FIRST_SLOT)
        out = head.run(target, *entry, state.pool.draft.layers, attend, options.kernels)
        places = jnp.maximum(rows.pending - 1, 0)[:, None] + jnp.arange(depth)
        normed = jnp.take_along_axis(out.normed, places[..., None], axis=1)
        return head.logits(target, normed, options.kernels), out.states


def with_masks(state: EngineState, pending: Array, mask: MaskEntry, depth: int) -> TokenRun:
    """The pending tokens of each row, up to ``depth`` + 1, and ``depth`` - 1 masks behind them:
    consecutive entries, padded."""
    run = pending_tokens(state, pending, 2 * depth)
    offset = jnp.arange(2 * depth)
    known = offset < pending[:, None]
    valid = (offset < pending[:, None] + depth - 1) & state.rows.active[:, None]
    tokens = jnp.where(known, run.tokens, mask.token)
    return TokenRun(tokens, run.positions, valid, valid)
