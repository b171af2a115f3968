"""Speculative decoding for JAX: draft, tree-verify and accept in one compiled program."""

from jaxspec.config import CacheConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams, decode, init_state, prefill
from jaxspec.llm import LLM, Completion, TextChunk
from jaxspec.loading import BUILT_IN_HEAD, BUILT_IN_MODEL, load
from jaxspec.sampling import make_sampling
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.sharding import make_mesh

__all__ = [
    "BUILT_IN_HEAD",
    "BUILT_IN_MODEL",
    "LLM",
    "CacheConfig",
    "Completion",
    "Engine",
    "EngineParams",
    "SamplingParams",
    "SpeculationConfig",
    "TextChunk",
    "decode",
    "init_state",
    "load",
    "make_mesh",
    "make_sampling",
    "prefill",
]
