"""Drafters, which propose DraftTrees."""

from jaxspec.speculation.drafters.base import (
    Drafter,
    DraftState,
    PrefillChunk,
    StatelessDrafter,
)
from jaxspec.speculation.drafters.block import BlockDrafter
from jaxspec.speculation.drafters.draft_model import DraftModelDrafter
from jaxspec.speculation.drafters.eagle import EagleDrafter
from jaxspec.speculation.drafters.mixed import MixedDrafter
from jaxspec.speculation.drafters.ngram import NGramDrafter
from jaxspec.speculation.drafters.none import NoDrafter
from jaxspec.speculation.drafters.suffix import SuffixDrafter

__all__ = [
    "BlockDrafter",
    "DraftModelDrafter",
    "DraftState",
    "Drafter",
    "EagleDrafter",
    "MixedDrafter",
    "NGramDrafter",
    "NoDrafter",
    "PrefillChunk",
    "StatelessDrafter",
    "SuffixDrafter",
]
