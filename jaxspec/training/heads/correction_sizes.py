"""The corrections and convolutions of new block heads, by a few sizes."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxspec.config.checks import Problems
from jaxspec.config.model import ModelConfig
from jaxspec.models.heads import MarkovConfig
from jaxspec.models.heads.convolutions import ConvolutionConfig
from jaxspec.models.heads.corrections import CorrectionConfig, LiLiCorrConfig, SelectorConfig
from jaxspec.training.heads.candidate_loss import BlockMethod

# Of published heads.
MOST_RANK, LATTICE_WIDTH, SHARE = 256, 1024, 4  # of heads that are four times as wide
GROUP, LATTICE_LAYERS, LATTICE_HEADS, LATTICE_MLP = 16, 2, 8, 2
VECTOR_EPS, LOGIT_SCALE = 1e-4, 8.0
LATTICE_CANDIDATES = (2, 4, 8, 16)

TAKEN: Mapping[BlockMethod, tuple[str, ...]] = MappingProxyType(
    {
        "dflash": (),
        "dspark": ("rank",),
        "dflash2": ("rank", "candidates", "taps"),
        "lilicorr": ("candidates", "width", "taps"),
    }
)


@dataclasses.dataclass(frozen=True)
class CorrectionSizes:
    """What a new head has beside DFlash's layers; None: as published, and less for a head that is
    not as wide.

    Attributes:
      rank: of a DSpark head's Markov head (0: it has none), or of a DFlash 2 head's selector.
      candidates: tokens of each depth that a DFlash 2 or LiLiCorr head chooses among.
      width: of a LiLiCorr head's transformer over candidates.
      taps: of the convolutions around a DFlash 2 or LiLiCorr head's mixers and MLPs; 0: it has
        none.
    """

    rank: int | None = None
    candidates: int | None = None
    width: int | None = None
    taps: int | None = None


class Extra(NamedTuple):
    """What a head has beside DFlash's layers."""

    correction: CorrectionConfig | None = None
    convolution: ConvolutionConfig | None = None


def extra_of(
    method: BlockMethod, layers: ModelConfig, block_size: int, sizes: CorrectionSizes
) -> Extra:
    """What a method's heads have, with sizes where some are given.

    Raises ValueError for sizes that do not fit, all of them in one.
    """
    given = dataclasses.asdict(sizes)
    idle = [name for name, size in given.items() if size is not None and name not in TAKEN[method]]
    if idle:
        raise ValueError(f"a {method} head takes no {' and no '.join(idle)}")
    hidden = layers.hidden_size
    rank = min(MOST_RANK, hidden // SHARE) if sizes.rank is None else sizes.rank
    match method:
        case "dflash":
            return Extra()
        case "dspark":
            return Extra(MarkovConfig(rank) if rank else None)
        case "dflash2":
            candidates = 16 if sizes.candidates is None else sizes.candidates
            taps = 2 if sizes.taps is None else sizes.taps
            _check_selector(rank, candidates, taps, layers.vocab_size, block_size)
            correction: CorrectionConfig = SelectorConfig(rank, candidates)
        case "lilicorr":
            taps = 0 if sizes.taps is None else sizes.taps
            correction = _lattice(layers, block_size, sizes, taps)
    group = math.gcd(GROUP, hidden)
    return Extra(correction, ConvolutionConfig(taps, group) if taps else None)


def _check_selector(rank: int, candidates: int, taps: int, vocab: int, block_size: int) -> None:
    problems = Problems()
    if rank < 1:
        problems.add(f"the selector's rank must be at least 1, got {rank}")
    if not 2 <= candidates <= vocab:
        problems.add(f"dflash2 chooses among 2 to {vocab} candidates, got {candidates}")
    if not 1 <= taps <= block_size:
        problems.add(f"in blocks of {block_size} dflash2 has 1 to {block_size} taps, got {taps}")
    problems.raise_all()


def _lattice(
    layers: ModelConfig, block_size: int, sizes: CorrectionSizes, taps: int
) -> LiLiCorrConfig:
    problems, usual = Problems(), min(LATTICE_WIDTH, layers.hidden_size // SHARE)
    candidates = 8 if sizes.candidates is None else sizes.candidates
    width = max(1, usual // LATTICE_HEADS) * LATTICE_HEADS if sizes.width is None else sizes.width
    if candidates not in LATTICE_CANDIDATES or candidates > layers.vocab_size:
        problems.add(f"lilicorr chooses among 2, 4, 8 or 16 candidates, got {candidates}")
    if width < 1 or width % LATTICE_HEADS:
        problems.add(f"the lattice's width must be a multiple of {LATTICE_HEADS}, got {width}")
    if not 0 <= taps <= block_size:
        problems.add(f"in blocks of {block_size} lilicorr has 0 to {block_size} taps, got {taps}")
    problems.raise_all()
    return LiLiCorrConfig(
        candidates=candidates,
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
