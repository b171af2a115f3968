"""Corrections of block heads: the logits of a draft token, once those before it are known."""

from jaxspec.models.heads.corrections.base import Block, Correction, CorrectionConfig
from jaxspec.models.heads.corrections.markov import (
    MARKOV_KINDS,
    Markov,
    MarkovConfig,
    RecurrentMarkov,
)

__all__ = [
    "MARKOV_KINDS",
    "Block",
    "Correction",
    "CorrectionConfig",
    "Markov",
    "MarkovConfig",
    "RecurrentMarkov",
]
