"""Drafters, which propose DraftTrees."""

from jaxspec.decoding.drafters.assistant import AssistantDrafter
from jaxspec.decoding.drafters.base import (
    Drafter,
    DraftState,
    NoDrafter,
    PrefillChunk,
    Proposed,
    StatelessDrafter,
)
from jaxspec.decoding.drafters.block import BlockDrafter
from jaxspec.decoding.drafters.draft_model import DraftModelDrafter
from jaxspec.decoding.drafters.eagle import EagleDrafter
from jaxspec.decoding.drafters.host import HostDrafted
from jaxspec.decoding.drafters.mapped_model import MappedModelDrafter, VocabularyMap
from jaxspec.decoding.drafters.mixed import MixedDrafter
from jaxspec.decoding.drafters.ngram import NGramDrafter
from jaxspec.decoding.drafters.parallel_eagle import ParallelEagleDrafter
from jaxspec.decoding.drafters.suffix import SuffixDrafter

__all__ = [
    "AssistantDrafter",
    "BlockDrafter",
    "DraftModelDrafter",
    "DraftState",
    "Drafter",
    "EagleDrafter",
    "HostDrafted",
    "MappedModelDrafter",
    "MixedDrafter",
    "NGramDrafter",
    "NoDrafter",
    "ParallelEagleDrafter",
    "PrefillChunk",
    "Proposed",
    "StatelessDrafter",
    "SuffixDrafter",
    "VocabularyMap",
]
