"""Draft heads as drafters: EAGLE-1, 2, 3 and 3.1, MTP layers, and later kinds of head.

With one head every step runs it. With several (the MTP layers of a checkpoint) step ``j`` runs head
``j``, and steps past the last head run the last. The first head reads the target's hidden state of
the token before; head ``j`` reads what head ``j - 1`` computed of the token before. Each head has a
cache of its own, and its entry of token ``i`` lies at slot ``i`` in it, like all draft KV. It
depends on tokens up to ``i`` alone, and there is none for tokens 0 to ``j``.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters.base import (
    DraftState,
    PendingRows,
    PrefillChunk,
    Proposed,
)
from jaxspec.decoding.drafters.paged import (
    KeepsFeatures,
    TokenRun,
    beam_positions,
    causal_attend,
    entry_at,
    level_attend,
    make_proposer,
    pending_tokens,
    prompt_tokens,
)
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.grow import Beams, grow
from jaxspec.decoding.trees.likely_chain import grow_while_likely
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend
from jaxspec.models.heads import DraftHead, HeadOutput
from jaxspec.parallel.pytree import Pytree, array, pytree, static

FIRST_SLOT = 1  # there is no hidden state before token 0: head j never reads slots 0 to j
# Pending tokens that a head which listens reads at once: the more, the less each of them costs. At
# first it waits for fewer, since what it hears decides what is done.
HEARD_AT_ONCE, HEARD_FIRST = 16, 8


@pytree
class HeadRows(PendingRows):
    """``pending``: number of committed tokens of each row, root included, that the head has not
    read yet with the target's hidden states. ``features[:, t]`` is the captured state of the token
    before the ``t``-th of them. What later heads read is known only of tokens that are read:
    ``before`` has what each head but the last computed of the token before the first pending one,
    ``at_root`` of the root of the round under way, once it is read. None: there is one head."""

    features: Array = array("batch", "depth", "features")  # [R, A, C]
    before: Array | None = array("batch", "later", "whole_hidden", default=None)  # [R, L, H]
    at_root: Array | None = array("batch", "later", "whole_hidden", default=None)  # [R, L, H]

    def left(self, most: int) -> Array:
        if self.heard is None:
            return super().left(most)
        first = min(most, HEARD_FIRST)
        return jnp.where(self.heard[:, 0] > 0, most, first) - self.pending


@pytree
class EagleDrafter(KeepsFeatures, Pytree):
    """Drafts a chain or a dynamic tree with a draft head, or with one for each step.

    Attributes:
      head: of the first step.
      later: those of the next L steps. Steps past the last head run it, too.
      listens: while plain rounds go on, the first head is compared with what the target writes (see
        PendingRows), which tells whether drafting would pay. It costs the head's logits of each
        token, a few tokens at a time.
      least_probability: above 0, a chain of one head ends where no row's draft is at least so
        likely (see grow_while_likely), if texts do not depend on the draft. On a GPU the loop would
        cut a round into several graphs.
    """

    head: DraftHead
    later: tuple[DraftHead, ...] = ()
    least_probability: float = static(default=0.0)
    listens: bool = static(default=False)

    @property
    def heads(self) -> tuple[DraftHead, ...]:
        return self.head, *self.later

    @property
    def capture(self) -> tuple[int, ...]:
        return self.head.capture

    @property
    def num_reread_tokens(self) -> int:
        return len(self.heads)  # each head needs what the one before computes of one token more

    def init_pool(self, geometry: Geometry) -> ModelState:
        states = [head.init_state(geometry) for head in self.heads]
        pool = states[0].replace(layers=tuple(layer for state in states for layer in state.layers))
        pool.check_overwritable("this head")
        return pool

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> HeadRows:
        shape = (num_rows, self.most_pending(capacity), self.head.feature_size(target))
        rows = HeadRows(
            features=jnp.zeros(shape, self.head.dtype),
            pending=jnp.zeros(num_rows, jnp.int32),
            heard=jnp.zeros((num_rows, 2), jnp.int32) if self.listens else None,
        )
        if not self.later:
            return rows
        size = (num_rows, len(self.later), self.head.config.hidden_size)
        before, at_root = jnp.zeros(size, self.head.dtype), jnp.zeros(size, self.head.dtype)
        return rows.replace(before=before, at_root=at_root)

    def most_pending(self, capacity: SpeculationConfig) -> int:
        return max(capacity.max_depth + 1, HEARD_AT_ONCE if self.listens else 0)

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        options: RoundOptions,
    ) -> DraftState:
        assert features is not None
        pool, rows = _draft_state(state)
        features = features.astype(rows.features.dtype)
        before = entry_at(rows.features, rows.pending - 1)
        shifted = jnp.concatenate([before[:, None], features[:, :-1]], axis=1)
        run = prompt_tokens(state, chunk.tokens, chunk.counts)
        outputs = self._read(target, state, run, shifted, options)
        changed = chunk.counts > 0
        last = entry_at(features, chunk.counts - 1)
        kept = jnp.where(changed[:, None], last, rows.features[:, 0])
        rows = rows.replace(
            features=rows.features.at[:, 0].set(kept),
            pending=jnp.where(changed, 1, rows.pending),
            before=_where(changed, _outputs_at(outputs, chunk.counts - 1), rows.before),
        )
        if rows.heard is not None:
            rows = rows.replace(heard=jnp.where(changed[:, None], 0, rows.heard))
        return DraftState(pool=pool.replace(layers=outputs[-1].states), rows=rows)

    def _read(
        self,
        target: Decoder,
        state: EngineState,
        run: TokenRun,
        features: Array,
        options: RoundOptions,
    ) -> list[HeadOutput]:
        """Run all heads on committed tokens and the captured states [B, T, C] before them. The
        states of the last output are those of all layers."""
        pool, rows = _draft_state(state)
        layers = pool.layers
        outputs: list[HeadOutput] = []
        for index in range(len(self.heads)):
            attend = causal_attend(state, run, FIRST_SLOT + index)
            if rows.before is None or index == 0:
                hidden = self.head.hidden(features, options.kernels)
            else:
                before = rows.before[:, index - 1, None]
                hidden = jnp.concatenate([before, outputs[-1].hidden[:, :-1]], axis=1)
            entry = run.tokens, hidden, run.positions - 1
            outputs.append(self._run(index, target, entry, layers, attend, options))
            layers = outputs[-1].states
        return outputs

    def _run(
        self,
        index: int,
        target: Decoder,
        entry: tuple[Array, Array, Array],
        layers: LayerStates,
        attend: Attend,
        options: RoundOptions,
    ) -> HeadOutput:
        """What DraftHead.run returns for head ``index``. ``entry``: tokens, hidden states and
        positions; ``layers``: the states of all heads' layers."""
        head = self.heads[index]
        start = sum(len(head.layers) for head in self.heads[:index])
        end = start + len(head.layers)
        states = layers[start:end]
        out = head.run(target, *entry, states, attend, options.kernels)
        if 0 < index < len(self.later):
            # The next write to this head's pages depends on what the head before computes, not on
            # this read. Without an order XLA copies the pages, to write before it reads. The first
            # head is read before all others; nothing follows the last one in a step.
            out = lax.optimization_barrier(out)
        return out._replace(states=(*layers[:start], *out.states, *layers[end:]))

    def _read_pending(
        self, target: Decoder, state: EngineState, width: int, options: RoundOptions
    ) -> list[HeadOutput]:
        _, rows = _draft_state(state)
        run = pending_tokens(state, rows.pending, width)
        return self._read(target, state, run, rows.features[:, :width], options)

    def catch_up(self, target: Decoder, state: EngineState, options: RoundOptions) -> DraftState:
        pool, rows = _draft_state(state)
        outputs = self._read_pending(target, state, rows.features.shape[1], options)
        active, heard = state.rows.active, rows.heard
        if heard is not None and options.speculation.is_plain:
            heard = self._listen(target, state, outputs[0].normed, options)
        moved = active & (rows.pending > 1)  # else the root alone was pending, as it is afterwards
        last = jnp.where(
            active[:, None], entry_at(rows.features, rows.pending - 1), rows.features[:, 0]
        )
        rows = rows.replace(
            features=rows.features.at[:, 0].set(last),
            pending=jnp.where(active, 1, rows.pending),
            before=_where(moved, _outputs_at(outputs, rows.pending - 2), rows.before),
            at_root=_outputs_at(outputs, rows.pending - 1),
            heard=heard,
        )
        return DraftState(pool=pool.replace(layers=outputs[-1].states), rows=rows)

    def _listen(
        self, target: Decoder, state: EngineState, normed: Array, options: RoundOptions
    ) -> Array:
        """PendingRows.heard after the first head has read all pending tokens, from its outputs
        [B, T, H]: what follows each of them but the root is known."""
        _, rows = _draft_state(state)
        assert rows.heard is not None
        run = pending_tokens(state, rows.pending, normed.shape[1])
        layout, ids = self.head.vocab_layout(target), self.head.token_ids
        proposer = make_proposer(target, state, options, layout, ids)
        proposer = proposer._replace(context_lens=run.positions[:, 0])
        logits = self.head.logits(target, normed[:, :-1], options.kernels)
        drafted, _ = proposer.next_token(logits, 1 + jnp.arange(logits.shape[1]))
        known = run.valid[:, 1:]
        hits = known & (drafted == run.tokens[:, 1:])
        new = jnp.stack([known.sum(axis=1), hits.sum(axis=1)], axis=1)
        return rows.heard + new.astype(jnp.int32)

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        return self.propose_for(state.rows.active, target, state, options)

    def propose_for(
        self, wanted: Array, target: Decoder, state: EngineState, options: RoundOptions
    ) -> Proposed:
        """``propose``, where only drafts of the ``wanted`` [B] rows will be used: others do not
        keep a chain growing."""
        pool, rows = _draft_state(state)
        width = options.speculation.max_depth + 1
        outputs = self._read_pending(target, state, width, options)
        rows = rows.replace(at_root=_outputs_at(outputs, rows.pending - 1))
        used = self.heads[: options.speculation.max_depth]
        roots = tuple(
            entry_at(out.hidden, rows.pending - 1)[:, None] for out in outputs[: len(used)]
        )
        root_normed = entry_at(outputs[0].normed, rows.pending - 1)

        def step(beams: Beams, carry: Any) -> tuple[Array, Any]:
            """Draft with the next head; ``carry``: what the heads from the one that drafted before
            computed of the level before, and the states."""
            hidden, layers = carry
            if len(hidden) > 1:  # each head reads what the head before computed, the last its own
                hidden = hidden[:-1]
            first = len(used) - len(hidden)
            level = self._run_level(first, target, state, beams, hidden, layers, options)
            logits = used[first].logits(target, level[0].normed, options.kernels)
            return logits, (tuple(out.hidden for out in level), level[-1].states)

        layout = self.head.vocab_layout(target)
        proposer = make_proposer(target, state, options, layout, self.head.token_ids)
        root_logits = self.head.logits(target, root_normed, options.kernels)
        start = state.rows.roots, root_logits, step, (roots, outputs[-1].states)
        if self._ends_early(options.speculation):
            limit = wanted & state.rows.active, self.least_probability
            tree, (_, layers) = grow_while_likely(proposer, *start, *limit)
        else:
            tree, (_, layers) = grow(proposer, *start)
        return tree, DraftState(pool=pool.replace(layers=layers), rows=rows)

    def _run_level(
        self,
        first: int,
        target: Decoder,
        state: EngineState,
        beams: Beams,
        before: tuple[Array, ...],
        layers: LayerStates,
        options: RoundOptions,
    ) -> list[HeadOutput]:
        """Run head ``first`` and those after it on the k beams of a tree's level.

        Head ``first`` drafts from the beams. The later ones will see them, so they read them now;
        what the last one makes of them before its own turn is not needed.

        Args:
          before: for each of these heads what it reads of the level before, or of the root:
            [B, k, H], or [B, 1, H].
          layers: states of all heads' layers. Those of the last output are the new ones.
        """
        outputs: list[HeadOutput] = []
        for index, hidden in enumerate(before, first):
            read = jnp.take_along_axis(hidden, beams.parents[..., None], axis=1)
            entry = beams.tokens, read, beam_positions(state, beams) - 1
            attend = level_attend(state, beams, FIRST_SLOT + index)
            outputs.append(self._run(index, target, entry, layers, attend, options))
            layers = outputs[-1].states
        return outputs

    def _ends_early(self, spec: SpeculationConfig) -> bool:
        has_limit = self.least_probability > 0 and not self.later
        return has_limit and spec.is_chain and spec.acceptance == "match"

    def commit(
        self,
        state: EngineState,
        features: Array | None,
        path: Array,
        counts: Array,
        options: RoundOptions,
    ) -> DraftState:
        draft = super().commit(state, features, path, counts, options)
        if options.speculation.is_plain:
            return draft
        rows = draft.rows
        before = _where(state.rows.active, rows.at_root, rows.before)
        return draft.replace(rows=rows.replace(before=before))


def _draft_state(state: EngineState) -> tuple[ModelState, HeadRows]:
    return state.pool.draft, state.rows.draft


def _outputs_at(outputs: list[HeadOutput], index: Array) -> Array | None:
    """What each head but the last computed of token ``index`` [B] of its run: [B, L, H]."""
    if len(outputs) == 1:
        return None
    return jnp.stack([entry_at(out.hidden, index) for out in outputs[:-1]], axis=1)


def _where(changed: Array, new: Array | None, old: Array | None) -> Array | None:
    """``new`` [B, L, H] in the rows that ``changed`` [B], ``old`` in the others."""
    if new is None or old is None:
        return old
    return jnp.where(changed[:, None, None], new.astype(old.dtype), old)
