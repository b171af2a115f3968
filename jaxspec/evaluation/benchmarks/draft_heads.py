"""Draft heads of the sizes that published ones have, for random weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.model import LayerConfig, ModelConfig, draft_layers
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.config.quantization import Scheme
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    DraftHead,
    HeadConfig,
    MarkovConfig,
    block_head_shapes,
    block_layers,
    default_block_capture,
    default_capture,
    head_shapes,
    mtp_head_config,
)
from jaxspec.models.heads.block_context import Causality
from jaxspec.models.heads.convolutions import ConvolutionConfig
from jaxspec.models.heads.corrections import (
    CorrectionConfig,
    DominoConfig,
    LiLiCorrConfig,
    SelectorConfig,
    XPressConfig,
)
from jaxspec.models.heads.corrections.markov import MarkovKind
from jaxspec.models.quantized.lm_head_copy import with_lm_head_copy
from jaxspec.models.quantized.schemes import in_scheme
from jaxspec.parallel import Shards, mesh_layout

EAGLE3_VOCAB_SIZE = 32_000  # of the published EAGLE-3 heads, and of P-EAGLE's
EAGLE3_POSITIONS = 2048  # of those for Llama-3.1-8B
P_EAGLE_LAYERS = 4  # of SpecForge's P-EAGLE head for Qwen3-8B
BLOCK_LAYERS = 5  # of published block heads for Qwen3-8B; as many hidden states are read

BlockKind = Literal[
    "dflash",
    "dflash-windowed",
    "jetspec",
    "dspark",
    "dspark-gated",
    "dspark-rnn",
    "dflash2",
    "lilicorr",
    "domino",
    "xpress",
]
HeadKind = BlockKind | Literal["auto", "mtp", "eagle3-windowed", "p-eagle"]
BLOCK_KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
HEAD_KINDS: tuple[HeadKind, ...] = ("auto", "mtp", "eagle3-windowed", "p-eagle", *BLOCK_KINDS)
HEAD_HELP = (
    "the drafter: the shape's MTP layer if it has one, else an EAGLE-3 head (auto); an MTP layer "
    "for any shape, like the shape's last layer with attention, experts included, as "
    "train_drafter.py makes them (mtp); an EAGLE-3 head that sees 2,048 tokens, as published ones "
    "do that have no more positions (eagle3-windowed); a head that drafts all tokens in one pass "
    "(p-eagle); or a block head"
)


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """What published block heads of a kind have beside five layers; see BlockConfig.

    Attributes:
      window, full_layers: a window of all layers but so many, the last ones.
    """

    block_size: int = 16
    predicts_next: bool = False
    correction: CorrectionConfig | None = None
    convolution: ConvolutionConfig | None = None
    causal: Causality = "none"
    window: int | None = None
    full_layers: int = 0


def _dspark(kind: MarkovKind) -> BlockSizes:
    return BlockSizes(7, predicts_next=True, correction=MarkovConfig(256, kind))


_LATTICE = LiLiCorrConfig(
    candidates=8,
    hidden=1024,
    layers=2,
    heads=8,
    units=2048,
    factor=1024,
    depths=15,
    vector_eps=1e-4,
    logit_scale=8.0,
    eps=1e-6,
)
# Of heads that are published for Qwen3-8B: z-lab (DFlash), JetSpec, deepseek-ai/DeepSpec (DSpark),
# UIUC-SSAIL (XPress); of their trainers' configs for it: SpecForge (Domino), NVIDIA Model Optimizer
# (LiLiCorr). Windows and DFlash 2 are of z-lab's heads for Qwen3.6-27B and Muse-Glimmer-30B.
BLOCK_HEADS: Mapping[BlockKind, BlockSizes] = MappingProxyType(
    {
        "dflash": BlockSizes(),
        "dflash-windowed": BlockSizes(causal="windows", window=2048, full_layers=1),
        "jetspec": BlockSizes(causal="all"),
        "dspark": _dspark("vanilla"),
        "dspark-gated": _dspark("gated"),
        "dspark-rnn": _dspark("rnn"),
        "dflash2": BlockSizes(
            correction=SelectorConfig(rank=256, candidates=16),
            convolution=ConvolutionConfig(taps=2, group=16),
            window=2048,
        ),
        "lilicorr": BlockSizes(correction=_LATTICE),
        "domino": BlockSizes(
            predicts_next=True, correction=DominoConfig(state=1024, rank=256, first=1)
        ),
        "xpress": BlockSizes(correction=XPressConfig(rank=256, units=512, block_size=16)),
    }
)
# What train_drafter.py takes for most families without an MTP layer; see models/families/family.py.
TRAINED_MTP = MtpConfig("deepseek", 1, AFTER)


def head_shapes_for(
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    *,
    kind: HeadKind = "auto",
    quantization: Scheme | None = None,
) -> DraftHead | BlockHead:
    """A head of ShapeDtypeStructs, sharded as its target is; "auto": the one of ``head_config``.

    ``quantization``: of all its matrices but a correction's, and of a copy of the target's LM head
    if it has none; see models/quantized/schemes.py.
    """
    shards = Shards.over(mesh, mesh_layout(mesh))
    match kind:
        case "auto":
            shapes = head_shapes(head_config(target), target, dtype, shards)
        case "mtp":
            shapes = head_shapes(mtp_config(target), target, dtype, shards)
        case "eagle3-windowed":
            shapes = head_shapes(windowed_eagle3_config(target), target, dtype, shards)
        case "p-eagle":
            shapes = head_shapes(p_eagle_config(target), target, dtype, shards)
        case _:
            shapes = block_head_shapes(block_head_config(target, kind), target, dtype, shards)
    if quantization is None:
        return shapes
    decoder = decoder_shapes(target, dtype, shards)
    shapes = with_lm_head_copy(shapes, decoder, lambda lm_head: lm_head)  # rounded as the rest
    rounding = functools.partial(in_scheme, name=quantization, lm_head=True)
    return rounded_but_correction(shapes, rounding)


def rounded_but_correction[T: DraftHead | BlockHead](head: T, rounding: Callable[[T], T]) -> T:
    """A head of rounded weights but for its correction, as heads are loaded (see
    load_drafter.in_bits)."""
    if not isinstance(head, BlockHead):
        return rounding(head)
    return rounding(head.replace(correction=None)).replace(correction=head.correction)


def head_config(target: ModelConfig) -> HeadConfig:
    """The MTP layer of a target that has one, else an EAGLE-3 head for it."""
    return eagle3_config(target) if target.mtp is None else mtp_config(target)


def mtp_config(target: ModelConfig) -> HeadConfig:
    """The target's MTP layer, or the one that is trained for a target that has none: like its last
    layer with attention, so with experts if that has some.

    Raises ValueError for a target of recurrent layers only.
    """
    return mtp_head_config(target, target.mtp or TRAINED_MTP)


def eagle3_config(target: ModelConfig) -> HeadConfig:
    """An EAGLE-3 head with one Llama layer of the target's sizes, and a vocabulary of the size that
    published heads have."""
    model = draft_layers(target).map_layers(_without_scaling)
    capture = default_capture("eagle3", target.num_layers)
    vocab = min(EAGLE3_VOCAB_SIZE, target.vocab_size)
    return HeadConfig(model, "eagle3", capture, draft_vocab_size=vocab)


def windowed_eagle3_config(target: ModelConfig) -> HeadConfig:
    """An EAGLE-3 head as it is loaded if its file gives it 2,048 positions, fewer than the target
    has: with a window of as many tokens."""
    config = eagle3_config(target)
    model = config.model.map_layers(lambda layer: _with_window(layer, EAGLE3_POSITIONS))
    return dataclasses.replace(config, model=model)


def p_eagle_config(target: ModelConfig) -> HeadConfig:
    """An EAGLE-3 head of several layers that drafts all tokens in one pass, behind masks."""
    config = eagle3_config(target)
    model = draft_layers(target, P_EAGLE_LAYERS).map_layers(_without_scaling)
    return dataclasses.replace(config, model=model, mask_token=0)


def block_head_config(target: ModelConfig, kind: BlockKind) -> BlockConfig:
    """A block head with Qwen3 layers of the target's sizes, which reads hidden states from early to
    late in the target, at equal distances."""
    sizes, model = BLOCK_HEADS[kind], block_layers(target, BLOCK_LAYERS)
    windowed = BLOCK_LAYERS - sizes.full_layers
    layers = tuple(
        _with_window(_without_scaling(layer), sizes.window if index < windowed else None)
        for index, layer in enumerate(model.layers)
    )
    return BlockConfig(
        model=dataclasses.replace(model, layers=layers),
        capture=default_block_capture(target.num_layers),
        block_size=sizes.block_size,
        mask_token=0,
        predicts_next=sizes.predicts_next,
        causal=sizes.causal,
        correction=sizes.correction,
        convolution=sizes.convolution,
    )


def _with_window(layer: LayerConfig, window: int | None) -> LayerConfig:
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, window=window))


def _without_scaling(layer: LayerConfig) -> LayerConfig:
    rope = dataclasses.replace(layer.attention.rope, scaling=None)
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, rope=rope))
