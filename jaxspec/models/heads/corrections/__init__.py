"""Corrections of block heads: the logits of a draft token, once those before it are known."""

from jaxspec.models.heads.corrections.base import (
    Block,
    Correction,
    CorrectionConfig,
    Lattice,
    PairCorrection,
    PairScores,
    lattice_of,
)
from jaxspec.models.heads.corrections.domino import Domino, DominoConfig
from jaxspec.models.heads.corrections.lilicorr import LiLiCorr, LiLiCorrConfig
from jaxspec.models.heads.corrections.markov import (
    MARKOV_KINDS,
    Markov,
    MarkovConfig,
    RecurrentMarkov,
)
from jaxspec.models.heads.corrections.selector import Selector, SelectorConfig
from jaxspec.models.heads.corrections.xpress import XPress, XPressConfig

__all__ = [
    "MARKOV_KINDS",
    "Block",
    "Correction",
    "CorrectionConfig",
    "Domino",
    "DominoConfig",
    "Lattice",
    "LiLiCorr",
    "LiLiCorrConfig",
    "Markov",
    "MarkovConfig",
    "PairCorrection",
    "PairScores",
    "RecurrentMarkov",
    "Selector",
    "SelectorConfig",
    "XPress",
    "XPressConfig",
    "lattice_of",
]
