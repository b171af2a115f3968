"""EAGLE-3 and EAGLE-1/2 heads as drafters."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxspec.cache import init_layers
from jaxspec.config import SpeculationConfig
from jaxspec.models import eagle
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle import EagleHead
from jaxspec.pytree import array, pytree, static
from jaxspec.speculation.drafters.base import PrefillChunk
from jaxspec.speculation.drafters.paged import (
    DraftCache,
    beam_positions,
    causal_attend,
    level_attend,
    pending_tokens,
)
from jaxspec.speculation.expand import Beams, Proposer, grow
from jaxspec.speculation.tree import DraftTree
from jaxspec.state import EngineState

FIRST_SLOT = 1  # token 0 has no hidden state before it, so slot 0 is never read


@pytree
class EagleState:
    """``pending`` [B] committed tokens wait to be read with the target's true hidden states:
    ``features[:, t]`` is the captured state of the token before the ``t``-th of them."""

    cache: DraftCache
    features: Array = array("batch", "depth", "features")  # [B, A, C]
    pending: Array = array("batch")


@pytree
class EagleDrafter:
    """Drafts a chain or a dynamic tree with an EAGLE head."""

    head: EagleHead
    feature_size: int = static()  # C, width of the target's captured hidden states
    speculation: SpeculationConfig = static()

    @property
    def capture(self) -> tuple[int, ...]:
        return self.head.capture

    @property
    def num_nodes(self) -> int:
        return self.speculation.num_nodes

    @property
    def max_depth(self) -> int:
        return self.speculation.max_depth

    def init_state(
        self, batch: int, num_pages: int, page_size: int, mesh: Mesh | None
    ) -> EagleState:
        config, layer = self.head.config, self.head.layers[0]
        dtype, sharded = self.head.fc.dtype, self.head.axis is not None
        layers = init_layers(
            config.num_layers,
            num_pages,
            layer.qkv.shape[1],
            page_size,
            config.head_dim,
            dtype,
            mesh,
            sharded_heads=sharded,
        )
        return EagleState(
            cache=DraftCache(layers=layers, sharded=sharded),
            features=jnp.zeros((batch, self.max_depth + 1, self.feature_size), dtype),
            pending=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self, target: Decoder, state: EngineState, chunk: PrefillChunk, features: Array | None
    ) -> EagleState:
        assert features is not None
        draft: EagleState = state.draft
        features = features.astype(draft.features.dtype)
        before = _at(draft.features, draft.pending - 1)
        shifted = jnp.concatenate([before[:, None], features[:, :-1]], axis=1)
        offset = jnp.arange(chunk.tokens.shape[1])
        positions = state.context_lens[:, None] + offset
        attend = causal_attend(state, positions, offset < chunk.counts[:, None], FIRST_SLOT)
        _, _, layers = eagle.run(
            self.head, target, chunk.tokens, shifted, positions - 1, draft.cache.layers, attend
        )
        changed = chunk.counts > 0
        last = _at(features, chunk.counts - 1)
        kept = jnp.where(changed[:, None], last, draft.features[:, 0])
        return EagleState(
            cache=DraftCache(layers=layers, sharded=draft.cache.sharded),
            features=draft.features.at[:, 0].set(kept),
            pending=jnp.where(changed, 1, draft.pending),
        )

    def propose(self, target: Decoder, state: EngineState) -> tuple[DraftTree, EagleState]:
        draft: EagleState = state.draft
        tokens, positions, valid = pending_tokens(state, draft.pending, self.max_depth + 1)
        attend = causal_attend(state, positions, valid, FIRST_SLOT)
        outputs, normed, layers = eagle.run(
            self.head, target, tokens, draft.features, positions - 1, draft.cache.layers, attend
        )
        root_output, root_normed = (_at(x, draft.pending - 1) for x in (outputs, normed))

        def step(beams: Beams, carry: Any) -> tuple[Array, Any]:
            outputs, layers = carry
            outputs, normed, layers = eagle.run(
                self.head,
                target,
                beams.tokens,
                jnp.take_along_axis(outputs, beams.parents[..., None], axis=1),
                beam_positions(state, beams) - 1,
                layers,
                level_attend(state, beams, FIRST_SLOT),
            )
            return eagle.logits(self.head, target, normed), (outputs, layers)

        proposer = Proposer(
            speculation=self.speculation,
            sampling=state.sampling,
            context_lens=state.context_lens,
            axis=eagle.vocab_axis(self.head, target),
            token_ids=self.head.token_ids,
            target_vocab=target.embed.shape[0],
            target_axis=target.axis,
        )
        root_logits = eagle.logits(self.head, target, root_normed)
        carry = (root_output[:, None], layers)
        tree, (_, layers) = grow(proposer, state.roots, root_logits, step, carry)
        cache = DraftCache(layers=layers, sharded=draft.cache.sharded)
        return tree, EagleState(cache=cache, features=draft.features, pending=draft.pending)

    def commit(
        self,
        draft: EagleState,
        features: Array | None,
        path: Array,
        counts: Array,
        active: Array,
    ) -> EagleState:
        assert features is not None
        accepted = jnp.take_along_axis(features, path[..., None], axis=1)
        accepted = accepted.astype(draft.features.dtype)
        return EagleState(
            cache=draft.cache,
            features=jnp.where(active[:, None, None], accepted, draft.features),
            pending=jnp.where(active, counts, draft.pending),
        )


def _at(x: Array, index: Array) -> Array:
    """Row ``index`` [B] of each x [B, T, C], the first where it is negative: [B, C]."""
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]
