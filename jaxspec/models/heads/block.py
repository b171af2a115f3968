"""Block draft heads: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

One pass writes a whole block of draft tokens. Its input is the last committed token and mask
tokens; they see the context and each other, in both directions or, in some heads' layers, only
what comes before. The context is not what the head has read itself: its keys and values are
projections of the target's hidden states, of committed tokens only. So a cache page of the head
depends on the tokens up to the page's end alone, and a block reads nothing but pages.

Embeddings and LM head are the target's, with their scales and caps. DFlash's masks are filled in:
the output at a mask is the token there. In DSpark's blocks each output is the token after it, so as
many tokens are drafted with one mask less. A correction, such as DSpark's Markov head, adds what
the tokens before say of the next one.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.model import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend, make_pass
from jaxspec.models.heads.block_context import (
    AttendBeside,
    BlockAttend,
    Causality,
    Context,
    WriteOnly,
)
from jaxspec.models.heads.confidence import Confidence
from jaxspec.models.heads.convolutions import (
    ConvolutionConfig,
    ConvolvedMixer,
    context_mixer,
    with_convolutions,
)
from jaxspec.models.heads.corrections import (
    Correction,
    CorrectionConfig,
    Domino,
    LiLiCorr,
    Markov,
    MarkovConfig,
    PairCorrection,
    Selector,
    XPress,
)
from jaxspec.models.heads.lm_head import LMHeadCopy, target_logits
from jaxspec.models.layer import Layer, layer_shape, run_layers
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel import ONE_SHARD, WHOLE, Layout, Shards
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.add_rms_norm.reference import followed_by
from pallas_kernels.paged_attention.reference import capped
from pallas_kernels.selection import NO_KERNELS, Kernels


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Configuration of a block head.

    Attributes:
      model: its layers; vocabulary and hidden size are the target's.
      capture: the target's hidden states that it reads (see decoder.run).
      block_size: tokens of a block, the last committed one included.
      mask_token: id of the tokens after that one.
      predicts_next: the output at a token is the one after it (DSpark), not the one there (DFlash).
      causal: the layers in which a block's tokens see only those before them.
      mask_embedding: the mask has an embedding that is not the target's.
      draft_vocab_size: size of a reduced draft vocabulary; None: draft ids are the target's.
      correction: of the logits by the tokens before; None: there is none.
      convolution: around mixers and MLPs; None: there is none.
      logit_scale, logit_softcap: the LM head's logits are multiplied and capped so (see
        AttentionConfig.softcap).
      confidence: what the confidence head reads, the token before by the Markov head's embedding;
        None: there is none.
    """

    model: ModelConfig
    capture: tuple[int, ...]
    block_size: int
    mask_token: int
    predicts_next: bool = False
    causal: Causality = "none"
    mask_embedding: bool = False
    draft_vocab_size: int | None = None
    correction: CorrectionConfig | None = None
    convolution: ConvolutionConfig | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    confidence: Literal["output", "output and token"] | None = None

    def __post_init__(self):
        reads_token = self.confidence == "output and token"
        if reads_token and not isinstance(self.correction, MarkovConfig):
            raise ValueError("a confidence head that reads the token before needs a Markov head")
        is_markov = self.correction is None or isinstance(self.correction, MarkovConfig)
        if self.draft_vocab_size is not None and not is_markov:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens is not supported for a "
                "block drafter with this correction of its logits, only the target's"
            )


@pytree
class BlockHead(Pytree):
    """Weights of a block head.

    Attributes:
      fc: [C, H], fuses the captured states.
      hidden_norm: norm of the fused states, which all layers' keys and values are made from.
      norm: norm before the LM head.
      mask_embedding: [H], read in place of the target's embedding of the mask, or None.
      lm_head: [H, W], of a reduced draft vocabulary; None: the target's LM head. It is whole on
        every device, as tables of corrections are.
      token_ids: [W] target id of each draft id; None: the ids are equal.
      lm_head_copy: the target's LM head in fewer bits, read in its place (see lm_head.py).
      config: of the layers.
      exchange: memory in which thread blocks meet (see ForwardPass).
      capture, block_size, mask_token, predicts_next, causal, logit_scale, logit_softcap: see
        BlockConfig.
    """

    fc: Linear
    hidden_norm: Array = array("hidden")
    layers: tuple[Layer, ...]
    norm: Array = array("hidden")
    mask_embedding: Array | None = array("whole_hidden", default=None)
    lm_head: Linear | None = None
    token_ids: Array | None = array("draft_ids", default=None)
    correction: Correction | PairCorrection | None = None
    lm_head_copy: LMHeadCopy | None = None
    confidence: Confidence | None = None
    config: ModelConfig = static()
    capture: tuple[int, ...] = static()
    block_size: int = static()
    mask_token: int = static()
    predicts_next: bool = static(default=False)
    causal: Causality = static(default="none")
    logit_scale: float = static(default=1.0)
    logit_softcap: float | None = static(default=None)
    layout: Layout = static(default=WHOLE)
    exchange: Array | None = array("peers", "cells", default=None)

    @property
    def dtype(self) -> jnp.dtype:
        return self.fc.dtype

    @property
    def markov(self) -> Markov | None:
        """The correction, if it is a Markov head."""
        return self.correction if isinstance(self.correction, Markov) else None

    @property
    def convolution(self) -> ConvolutionConfig | None:
        """The convolutions around its layers' mixers and MLPs; None: there are none."""
        mixer = self.layers[0].mixer
        return mixer.convolution.config if isinstance(mixer, ConvolvedMixer) else None

    @property
    def reads_context(self) -> bool:
        """Whether its correction reads the context's last token."""
        return isinstance(self.correction, LiLiCorr)

    @property
    def reads_root(self) -> bool:
        """Whether its correction reads the output at the root, and the token before it."""
        return isinstance(self.correction, XPress)

    @property
    def method(self) -> str:
        """The head's kind, as commands and cards name it."""
        named: dict[Any, str] = {Selector: "dflash2", LiLiCorr: "lilicorr"}
        named |= {Domino: "domino", XPress: "xpress"}
        return named.get(type(self.correction), "dspark" if self.predicts_next else "dflash")

    @property
    def max_depth(self) -> int:
        """The most tokens that one block drafts."""
        return self.block_size - self._unused

    @property
    def _unused(self) -> int:
        """Tokens of a block that draft none: DFlash's first one, Domino's last."""
        return int(not self.predicts_next or isinstance(self.correction, Domino))

    def vocab_layout(self, target: Decoder) -> Layout:
        """How the last dimension of ``logits`` is split."""
        if self.lm_head is None:
            return target.layout
        return dataclasses.replace(self.layout, vocab=())

    def check_depth(self, max_depth: int) -> None:
        """Raises ValueError for trees deeper than a block."""
        if max_depth > self.max_depth:
            raise ValueError(
                f"this block drafter writes {self.max_depth} tokens at once, and the draft tree "
                f"has a max_depth of {max_depth}: choose one of at most {self.max_depth}"
            )

    def init_state(self, geometry: Geometry) -> ModelState:
        """Empty states of all layers."""
        states = (layer.init_state(geometry, self.layout) for layer in self.layers)
        return ModelState(layers=tuple(states), layout=self.layout)

    def fused(self, captured: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """What all layers make keys and values of tokens from: of the target's hidden states
        [B, T, C] at these, [B, T, H]."""
        with jax.named_scope("fc"):
            fused = self.fc(captured.astype(self.dtype), kernels)
            return rms_norm(fused, self.hidden_norm, self.config.rms_norm_eps)

    def read_context(
        self,
        fused: Array,  # [B, T, H] a result of ``fused``
        positions: Array,  # [B, T] rotary positions
        states: LayerStates,
        attend: Attend,
        kernels: Kernels = NO_KERNELS,
    ) -> LayerStates:
        """The states that ``attend`` makes of tokens, of its two results."""
        eps = self.config.rms_norm_eps
        step = make_pass(self.config.layers, positions, attend, eps, self.layout, kernels)
        # Of a mixer's two results the first is not computed where it is not used.
        mixers = map(context_mixer, self.layers)
        pairs = zip((mixer for mixer in mixers if mixer is not None), states, strict=True)
        return tuple(mixer(fused, state, step)[1] for mixer, state in pairs)

    def write_context(
        self, context: Context, states: LayerStates, kernels: Kernels = NO_KERNELS
    ) -> LayerStates:
        """The states with the keys and values of a context."""
        attend = WriteOnly(slots=context.slots)
        return self.read_context(context.fused, context.positions, states, attend, kernels)

    def block(self, roots: Array, depth: int) -> Array:
        """The input that drafts ``depth`` tokens after ``roots`` [B]: int32 [B, T]."""
        masks = depth + self._unused - 1
        return jnp.pad(roots[:, None], ((0, 0), (0, masks)), constant_values=self.mask_token)

    def outputs(
        self,
        target: Decoder,
        block: Array,  # [B, T] a result of ``block``
        positions: Array,  # [B, T] rotary positions
        states: LayerStates,
        attend: Attend,
        kernels: Kernels = NO_KERNELS,
        beside: Array | None = None,  # [1, R, H]
    ) -> tuple[Array, LayerStates]:
        """One pass over a block: the normed outputs at each drafted position [B, depth, H], which
        the target's LM head reads, and the states. ``beside``: see run_layers."""
        how = block, positions, states, attend, kernels, beside
        normed, states = self.all_outputs(target, *how)
        return self.drafted(normed), states

    def drafted(self, normed: Array) -> Array:
        """The outputs [B, depth, H] that draft, of those of a block [B, T, H]."""
        return normed[:, : normed.shape[1] - self._unused] if self.predicts_next else normed[:, 1:]

    def all_outputs(
        self,
        target: Decoder,
        block: Array,
        positions: Array,
        states: LayerStates,
        attend: Attend,
        kernels: Kernels = NO_KERNELS,
        beside: Array | None = None,
    ) -> tuple[Array, LayerStates]:
        """``outputs`` at all of a block's positions: [B, T, H]."""
        x = decoder.embed(target, block).astype(self.dtype)
        if self.mask_embedding is not None:  # all tokens but the first are masks
            x = x.at[:, 1:].set(self.mask_embedding)
        eps, exchange = self.config.rms_norm_eps, self.exchange
        how = attend, eps, self.layout, kernels
        step = make_pass(self.config.layers, positions, *how, exchange=exchange)
        first = followed_by(step.norm(x, self.layers[0].input_norm), beside)
        _, normed, states = run_layers(self.layers, x, first, states, step, self.norm, beside)
        return normed, states

    def outputs_beside(
        self,
        target: Decoder,
        block: Array,  # [B, T] a result of ``block``
        context: Context,
        states: LayerStates,
        attend: BlockAttend,  # of the block
        kernels: Kernels = NO_KERNELS,
    ) -> tuple[Array, LayerStates]:
        """``all_outputs`` of a block whose pass also writes the keys and values of a context."""
        positions = context.beside(attend.positions, context.positions)
        both = AttendBeside(attend, context)
        return self.all_outputs(target, block, positions, states, both, kernels, context.rows)

    def logits(self, target: Decoder, outputs: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """This shard's float32 logits of outputs, not corrected: [B, depth, V / shards], or of a
        reduced vocabulary [B, depth, W]."""
        if self.lm_head is not None:
            with jax.named_scope("lm_head"):
                return self.lm_head.float32(outputs, kernels)
        logits = target_logits(target, self.lm_head_copy, outputs, kernels)
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return capped(logits, self.logit_softcap)

    @jax.named_scope("confidence")
    def confidence_of(self, outputs: Array, before: Array) -> Array:
        """How likely each drafted token is accepted if those before it are: float32 [B, depth].

        Args: outputs [B, depth, H], and the tokens before the drafted ones, int32 [B, depth].

        Raises ValueError without a confidence head.
        """
        if self.confidence is None:
            raise ValueError("this block head has no confidence head")
        return jax.nn.sigmoid(self.confidence(outputs, self.markov, before))

    def mapped(self, tensor_map: TensorMap) -> "BlockHead":
        """The same, with every array replaced by ``tensor_map``'s result. ``token_ids`` is None in
        the result: checkpoints store differences of ids."""
        norms: dict[str, Any] = {
            "hidden_norm": tensor_map.array("hidden_norm.weight", self.hidden_norm),
            "norm": tensor_map.array("norm.weight", self.norm),
            "mask_embedding": tensor_map.array("mask_embedding", self.mask_embedding),
        }
        return self.replace(
            fc=tensor_map.linear(self.fc, One("fc")),
            lm_head=tensor_map.linear(self.lm_head, One("lm_head")),
            token_ids=None,
            layers=tuple(
                layer.mapped(f"layers.{index}.", tensor_map)
                for index, layer in enumerate(self.layers)
            ),
            correction=None if self.correction is None else self.correction.mapped(tensor_map),
            confidence=None if self.confidence is None else self.confidence.mapped(tensor_map),
            **norms,
        )


def block_head_shapes(
    head: BlockConfig, target: ModelConfig, dtype: jnp.dtype, shards: Shards = ONE_SHARD
) -> BlockHead:
    """A head of ShapeDtypeStructs, laid out for ``shards``. Its hidden states are whole on every
    device.

    Raises ValueError for sizes that cannot be split evenly.
    """
    shards = shards.one_dimensional
    config, hidden, vocab = head.model, head.model.hidden_size, target.vocab_size
    features = target.hidden_size * len(head.capture)
    correction, read = head.correction, hidden
    if head.confidence == "output and token":
        assert isinstance(correction, MarkovConfig)  # see BlockConfig
        read += correction.rank
    width = head.draft_vocab_size
    lm_head = linear_shape(("hidden", "draft_ids"), (hidden, width or vocab), dtype)
    confidence = Confidence(
        weight=array_shape(1, read, dtype=dtype), bias=array_shape(1, dtype=dtype)
    )
    return BlockHead(
        fc=linear_shape(("features", "hidden"), (features, hidden), dtype),
        hidden_norm=vector(hidden, dtype),
        layers=tuple(
            with_convolutions(layer_shape(layer, hidden, dtype, shards), head.convolution, hidden)
            for layer in config.layers
        ),
        norm=vector(hidden, dtype),
        mask_embedding=vector(hidden, dtype, when=head.mask_embedding),
        lm_head=None if width is None else lm_head,
        token_ids=array_shape(width or 0, dtype=jnp.int32, when=width is not None),
        correction=_correction_shape(head, vocab, dtype),
        confidence=None if head.confidence is None else confidence,
        config=config,
        capture=head.capture,
        block_size=head.block_size,
        mask_token=head.mask_token,
        predicts_next=head.predicts_next,
        causal=head.causal,
        logit_scale=head.logit_scale,
        logit_softcap=head.logit_softcap,
        layout=shards.layout,
    )


def _correction_shape(head: BlockConfig, vocab: int, dtype: jnp.dtype) -> Any:
    """A Markov head reads the target's ids, and adds to logits of draft ids."""
    if head.correction is None:
        return None
    shape = head.correction.shape(head.model.hidden_size, vocab, dtype)
    if head.draft_vocab_size is None:
        return shape
    after = array_shape(head.draft_vocab_size, shape.after.shape[1], dtype=dtype)
    return shape.replace(after=after)
