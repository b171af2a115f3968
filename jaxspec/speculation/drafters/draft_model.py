"""A separate, smaller language model as drafter (Leviathan et al., arXiv 2211.17192)."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxspec.cache import init_layers
from jaxspec.config import SpeculationConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
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


@pytree
class DraftModelState:
    """``pending`` [B]: committed tokens, root included, that the draft model reads next."""

    cache: DraftCache
    pending: Array = array("batch")


@pytree
class DraftModelDrafter:
    """Drafts with ``model``, which shares the target's tokenizer."""

    model: Decoder
    speculation: SpeculationConfig = static()

    @property
    def capture(self) -> tuple[int, ...]:
        return ()

    @property
    def num_nodes(self) -> int:
        return self.speculation.num_nodes

    @property
    def max_depth(self) -> int:
        return self.speculation.max_depth

    def init_state(
        self, batch: int, num_pages: int, page_size: int, mesh: Mesh | None
    ) -> DraftModelState:
        config, layer = self.model.config, self.model.layers[0]
        layers = init_layers(
            config.num_layers,
            num_pages,
            layer.qkv.shape[1],
            page_size,
            config.head_dim,
            self.model.embed.dtype,
            mesh,
            sharded_heads=self.model.axis is not None,
        )
        cache = DraftCache(layers=layers, sharded=self.model.axis is not None)
        return DraftModelState(cache=cache, pending=jnp.zeros(batch, jnp.int32))

    def prefill(
        self, target: Decoder, state: EngineState, chunk: PrefillChunk, features: Array | None
    ) -> DraftModelState:
        offset = jnp.arange(chunk.tokens.shape[1])
        positions = state.context_lens[:, None] + offset
        attend = causal_attend(state, positions, offset < chunk.counts[:, None])
        draft: DraftModelState = state.draft
        _, layers, _ = decoder.run(self.model, chunk.tokens, positions, draft.cache.layers, attend)
        return DraftModelState(
            cache=DraftCache(layers=layers, sharded=draft.cache.sharded),
            pending=jnp.where(chunk.counts > 0, 1, draft.pending),
        )

    def propose(self, target: Decoder, state: EngineState) -> tuple[DraftTree, DraftModelState]:
        draft: DraftModelState = state.draft
        tokens, positions, valid = pending_tokens(state, draft.pending, self.max_depth + 1)
        attend = causal_attend(state, positions, valid)
        hidden, layers, _ = decoder.run(self.model, tokens, positions, draft.cache.layers, attend)
        last = jnp.maximum(draft.pending - 1, 0)[:, None, None]
        root_hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]

        def step(beams: Beams, layers: Any) -> tuple[Array, Any]:
            hidden, layers, _ = decoder.run(
                self.model,
                beams.tokens,
                beam_positions(state, beams),
                layers,
                level_attend(state, beams),
            )
            return decoder.logits(self.model, hidden), layers

        proposer = Proposer(
            speculation=self.speculation,
            sampling=state.sampling,
            context_lens=state.context_lens,
            axis=self.model.axis,
            token_ids=None,
            target_vocab=target.embed.shape[0],
            target_axis=target.axis,
        )
        root_logits = decoder.logits(self.model, root_hidden)
        tree, layers = grow(proposer, state.roots, root_logits, step, layers)
        cache = DraftCache(layers=layers, sharded=draft.cache.sharded)
        return tree, DraftModelState(cache=cache, pending=draft.pending)

    def commit(
        self,
        draft: DraftModelState,
        features: Array | None,
        path: Array,
        counts: Array,
        active: Array,
    ) -> DraftModelState:
        return DraftModelState(cache=draft.cache, pending=jnp.where(active, counts, draft.pending))
