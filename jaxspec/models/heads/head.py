"""Draft heads: a few transformer layers that predict the target's next hidden state.

All heads share one structure: a *front* combines a token's embedding with the hidden state of the
token before it; layers follow; an LM head reads their output, which is also the hidden state of the
next drafting step. The entry for token ``i`` combines its embedding with the hidden state of token
``i - 1`` and has rotary position ``i - 1``. Each front has its own file.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.model import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.attention import layout_of_pass
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend, ForwardPass, make_pass
from jaxspec.models.heads.lm_head import LMHeadCopy, target_logits
from jaxspec.models.layer import Layer, run_layers
from jaxspec.models.linear import Linear
from jaxspec.models.streams import AnyFold, FoldedNorm
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel import WHOLE, Layout
from jaxspec.parallel.collectives import all_tokens, local_tokens, padded_tokens
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import NO_KERNELS, Kernels


class FrontOutput(NamedTuple):
    """The result of a front for embeddings and hidden states [B, T, H]."""

    residual: Array  # [B, T, H] the residual stream that the first layer adds to, or [B, T, N, H]
    mixer_input: Array  # [B, T, in] input of the first layer's mixer


class Front(Protocol):
    """A frozen pytree that computes hidden states from captured ones, and the layers' input."""

    @property
    def method(self) -> str:
        """The head's kind, as configs and cards name it."""
        ...

    @property
    def norm_name(self) -> str:
        """What checkpoints call the head's final norm."""
        ...

    @property
    def lm_head_name(self) -> str:
        """What checkpoints call the head's LM head, if it has one."""
        ...

    @property
    def fc(self) -> Linear:
        """The projection that combines the front's inputs."""
        ...

    def hidden(self, captured: Array, eps: float, kernels: Kernels) -> Array:
        """Hidden states [..., H] from the target's captured ones [..., C]; ``eps`` is for norms."""
        ...

    def __call__(
        self, embedded: Array, hidden: Array, first: Layer, step: ForwardPass
    ) -> FrontOutput:
        """Combine embeddings and hidden states [B, T, H] for the first layer."""
        ...

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Front":
        """The same, with every array replaced by ``tensor_map``'s result."""
        ...


class FrontShape(NamedTuple):
    """A front of ShapeDtypeStructs, and what it requires of the head around it."""

    front: Front
    mixer_input_size: int  # width of the first mixer's input
    norms_input: bool  # the first layer has an input norm
    has_norm: bool  # the head has a final norm
    has_lm_head: bool  # the head has its own LM head


class HeadOutput(NamedTuple):
    """One pass of a head."""

    hidden: Array  # [B, T, H] hidden states for the next drafting step
    normed: Array  # [B, T, H] input of the LM head
    states: LayerStates


@pytree
class MaskEntry(Pytree):
    """What a head that drafts several tokens at once reads of one that is not known (P-EAGLE).

    ``hidden``: in place of the target's captured states. ``token``: its id.
    """

    hidden: Array = array("features")  # [C]
    token: int = static()

    def mapped(self, tensor_map: TensorMap) -> "MaskEntry":
        """The same, with the array replaced by ``tensor_map``'s result."""
        return self.replace(hidden=tensor_map.array("mask_hidden", self.hidden))


@pytree
class DraftHead(Pytree):
    """Weights of a draft head.

    Attributes:
      norm: norm before the LM head; None: no norm.
      lm_head: [H, W]; None: the target's LM head.
      lm_head_copy: the target's LM head in fewer bits, read in its place (see lm_head.py).
      token_ids: [W] target id of each draft id; None: the ids are equal.
      embed: embeddings; None: the target's.
      fold: makes one residual stream of several before the norm (see streams.py). The next drafting
        step reads all of them, side by side, in place of [B, T, H]; None: there is one.
      mask: of heads that draft several tokens at once; None: it drafts one after the other.
      capture: the target's hidden states that it reads (see decoder.run).
      recycle_normed: the next drafting step reads the normed output (EAGLE-3.1's ``norm_output``).
      exchange: memory in which devices add up row-parallel products, or thread blocks meet.
    """

    front: Front
    layers: tuple[Layer, ...]
    norm: Array | None = array("hidden")
    lm_head: Linear | None
    lm_head_copy: LMHeadCopy | None = None
    token_ids: Array | None = array("draft_ids")
    embed: Array | None = array("embed_rows", "hidden")
    mask: MaskEntry | None = None
    fold: AnyFold | None = None
    config: ModelConfig = static()
    capture: tuple[int, ...] = static()
    recycle_normed: bool = static(default=False)
    layout: Layout = static(default=WHOLE)
    exchange: Array | None = array("peers", "cells", default=None)

    @property
    def dtype(self) -> jnp.dtype:
        return self.front.fc.dtype

    @property
    def method(self) -> str:
        return self.front.method

    def feature_size(self, target: Decoder) -> int:
        """Width C of the target's captured hidden states."""
        return decoder.captured_size(target.config, self.capture)

    def init_state(self, geometry: Geometry) -> ModelState:
        """Empty states of all layers."""
        states = (layer.init_state(geometry, self.layout) for layer in self.layers)
        return ModelState(layers=tuple(states), layout=self.layout)

    def vocab_layout(self, target: Decoder) -> Layout:
        """How the last dimension of ``logits`` is split."""
        return target.layout if self.lm_head is None else self.layout

    def hidden(self, captured: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """Hidden states for the first drafting step: captured [..., C] -> [..., H]."""
        return self.front.hidden(captured.astype(self.dtype), self.config.rms_norm_eps, kernels)

    def run(
        self,
        target: Decoder,
        tokens: Array,  # [B, T]
        hidden: Array,  # [B, T, H] of the tokens before
        positions: Array,  # [B, T] rotary positions
        states: LayerStates,
        attend: Attend,
        kernels: Kernels = NO_KERNELS,
    ) -> HeadOutput:
        """One pass over tokens, each with the hidden state of the token before it."""
        embed = self.embed
        embedded = decoder.plain_embed(target, tokens) if embed is None else embed[tokens]
        layers, eps = self.config.layers, self.config.rms_norm_eps
        layout = layout_of_pass(self.layout, attend)
        step = make_pass(layers, positions, attend, eps, layout, kernels, exchange=self.exchange)
        if layout.tokens:
            embedded, hidden = (
                local_tokens(padded_tokens(x, layout.tokens), layout.tokens)
                for x in (embedded, hidden)
            )
        front = self.front(embedded.astype(self.dtype), hidden, self.layers[0], step)
        norm = self.norm if self.fold is None else FoldedNorm(self.fold, self.norm)
        after, normed, states = run_layers(
            self.layers, front.residual, front.mixer_input, states, step, norm
        )
        last = after[-1] if self.fold is None else after[-1].reshape(*after[-1].shape[:2], -1)
        last, normed = (all_tokens(x, layout.tokens, tokens.shape[1]) for x in (last, normed))
        return HeadOutput(normed if self.recycle_normed else last, normed, states)

    def logits(self, target: Decoder, normed: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """This shard's float32 draft logits: [..., H] -> [..., W / shards] (or V / shards)."""
        if self.lm_head is None:
            return target_logits(target, self.lm_head_copy, normed, kernels)
        with jax.named_scope("lm_head"):
            return self.lm_head.float32(normed, kernels)

    def mapped(self, first_layer: str, tensor_map: TensorMap) -> "DraftHead":
        """The same, with every array replaced by ``tensor_map``'s result.

        ``first_layer`` is the checkpoint's name of layer 0. ``token_ids`` is None in the result:
        checkpoints store differences of ids.
        """
        tensor_map = tensor_map.with_norms(self.config.norm_offset)
        prefixes = [f"{first_layer}.", *(f"layers.{i}." for i in range(1, len(self.layers)))]
        return self.replace(
            front=self.front.mapped(prefixes[0], tensor_map),
            layers=tuple(
                layer.mapped(prefix, tensor_map)
                for layer, prefix in zip(self.layers, prefixes, strict=True)
            ),
            norm=tensor_map.norm(self.front.norm_name, self.norm),
            lm_head=tensor_map.linear(self.lm_head, One(self.front.lm_head_name)),
            token_ids=None,
            embed=tensor_map.array("embed_tokens.weight", self.embed),
            mask=None if self.mask is None else self.mask.mapped(tensor_map),
            fold=self.fold and self.fold.mapped(prefixes[0], tensor_map),
        )
