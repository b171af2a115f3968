"""A block head (DFlash, DSpark, DFlash 2, LiLiCorr) to begin training with."""

import dataclasses
import math

import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.block_head import block_config, to_hf_block
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    MarkovConfig,
    block_head_shapes,
    default_block_capture,
)
from jaxspec.models.heads.convolutions import ConvolutionConfig
from jaxspec.models.heads.corrections import CorrectionConfig, LiLiCorrConfig, SelectorConfig
from jaxspec.training.heads.candidate_loss import BlockMethod
from jaxspec.training.initial import init_correction, init_layers, reads_last

# Of published heads: the most entries of a token's vector, a DFlash 2 head's candidates, taps and
# channels that share a part, and a LiLiCorr head's candidates.
RANK, CANDIDATES, TAPS, GROUP = 256, 16, 2, 16
LATTICE_CANDIDATES, LATTICE_WIDTH = 8, 1024
LATTICE_LAYERS, LATTICE_HEADS, LATTICE_MLP, VECTOR_EPS, LOGIT_SCALE = 2, 8, 2, 1e-4, 8.0


@dataclasses.dataclass(frozen=True)
class CorrectionSizes:
    """What a new head has beside DFlash's layers; None: as published, for smaller models less.

    Attributes:
      rank: of a DSpark head's Markov head (0: it has none), or of a DFlash 2 head's selector.
      candidates: tokens of each depth that a DFlash 2 or LiLiCorr head chooses among.
      width: of a LiLiCorr head's transformer.
      taps: of the convolutions around a DFlash 2 or LiLiCorr head's mixers and MLPs; 0: it has
        none.
    """

    rank: int | None = None
    candidates: int | None = None
    width: int | None = None
    taps: int | None = None


def default_mask(target: ModelConfig, known_tokens: int) -> int:
    """An id that no text has before a drafted token: the first past the tokenizer's, as published
    heads have it, if the embeddings have such a row, else the token that ends a text.

    Raises ValueError if the target has neither.
    """
    if known_tokens < target.vocab_size:
        return known_tokens
    if not target.stop_token_ids:
        raise ValueError(
            "the model has no unused token and none that ends a text: give a mask token"
        )
    return target.stop_token_ids[0]


def new_block_config(
    target: ModelConfig,
    layers: ModelConfig,
    method: BlockMethod,
    *,
    block_size: int,
    mask_token: int,
    capture: tuple[int, ...] | None = None,
    sizes: CorrectionSizes = CorrectionSizes(),
) -> BlockConfig:
    """The config of a head to train.

    Args:
      layers: the head's own, as heads.block_layers makes them.
      capture: see BlockConfig; None: five from early to late, at equal distances.

    Raises ValueError for a head that could not be loaded again.
    """
    dspark = method == "dspark"
    correction = _correction(method, layers, block_size, sizes)
    confidence = "output" if correction is None else "output and token"
    config = BlockConfig(
        model=layers,
        capture=capture or default_block_capture(target.num_layers),
        block_size=block_size,
        mask_token=mask_token,
        predicts_next=dspark,
        correction=correction,
        convolution=_convolution(method, layers.hidden_size, block_size, sizes),
        confidence=confidence if dspark else None,
    )
    shapes = block_head_shapes(config, target, jnp.dtype("float32"))
    block_config(to_hf_block(shapes, target), target)
    return config


def _correction(
    method: BlockMethod, layers: ModelConfig, block_size: int, sizes: CorrectionSizes
) -> CorrectionConfig | None:
    rank = min(RANK, layers.hidden_size // 4) if sizes.rank is None else sizes.rank
    match method:
        case "dflash":
            return None
        case "dspark":
            return MarkovConfig(rank) if rank else None
        case "dflash2":
            count = CANDIDATES if sizes.candidates is None else sizes.candidates
            _check_candidates(count, layers.vocab_size)
            return SelectorConfig(rank, count)
    count = LATTICE_CANDIDATES if sizes.candidates is None else sizes.candidates
    _check_candidates(count, layers.vocab_size)
    width = _lattice_width(layers.hidden_size) if sizes.width is None else sizes.width
    return LiLiCorrConfig(
        candidates=count,
        hidden=width,
        layers=LATTICE_LAYERS,
        heads=LATTICE_HEADS,
        units=LATTICE_MLP * width,
        factor=width,
        depths=block_size - 1,
        vector_eps=VECTOR_EPS,
        logit_scale=LOGIT_SCALE,
        eps=layers.rms_norm_eps,
    )


def _lattice_width(hidden: int) -> int:
    """A quarter of the head's width, as published for a width of 4096, that the heads divide."""
    return max(1, min(LATTICE_WIDTH, hidden // 4) // LATTICE_HEADS) * LATTICE_HEADS


def _check_candidates(count: int, vocab: int) -> None:
    if not 2 <= count <= vocab:
        raise ValueError(f"a depth has from 2 to {vocab} candidates, the model's tokens: {count}")


def _convolution(
    method: BlockMethod, hidden: int, block_size: int, sizes: CorrectionSizes
) -> ConvolutionConfig | None:
    """Raises ValueError for more taps than a block has tokens, and for a DFlash 2 head without."""
    usual = TAPS if method == "dflash2" else 0
    taps = usual if sizes.taps is None else sizes.taps
    least = 1 if method == "dflash2" else 0
    if not least <= taps <= block_size:
        raise ValueError(
            f"the convolutions of a {method} head with blocks of {block_size} tokens have from "
            f"{least} to {block_size} taps: {taps}"
        )
    return ConvolutionConfig(taps, math.gcd(GROUP, hidden)) if taps else None


def init_block_head(target: Decoder, config: BlockConfig, seed: int = 0) -> BlockHead:
    """A float32 head to train, with random weights except for these.

    ``fc`` starts as the identity on the last captured state, and the norm before the target's LM
    head as a copy of the target's. Convolutions leave everything as it is at first, DSpark's Markov
    head and DFlash 2's selector add nothing, and a confidence head says one half.
    """
    shapes = block_head_shapes(config, target.config, jnp.dtype("float32"))
    layers = shapes.replace(correction=None)
    head = init_layers(layers, config.model.num_layers, seed)
    correction = shapes.correction
    return head.replace(
        fc=reads_last(head.fc, target.config.hidden_size),
        # A copy, as training donates its state and the target's arrays must stay valid.
        norm=jnp.array(target.norm, jnp.float32),
        correction=None if correction is None else init_correction(correction, seed + 1),
    )
