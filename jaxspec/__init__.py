"""Speculative decoding for JAX: draft, tree-verify and accept in one compiled program."""

from importlib import metadata

from jaxspec.batch_run import Run
from jaxspec.config import PLAIN, CacheConfig, SpeculationConfig, TreeShape
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams, admit, decode, init_state, prefill, release
from jaxspec.llm import LLM, Completion, TextChunk, check_prompts
from jaxspec.loading import BUILT_IN_HEAD, BUILT_IN_MODEL, load
from jaxspec.sampling import make_controls, make_sampling
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.sharding import make_mesh
from jaxspec.state import Ending, Status

try:
    __version__ = metadata.version("jaxspec")
except metadata.PackageNotFoundError:  # a checkout on the path that nobody installed
    __version__ = "0+unknown"

__all__ = [
    "BUILT_IN_HEAD",
    "BUILT_IN_MODEL",
    "LLM",
    "PLAIN",
    "CacheConfig",
    "Completion",
    "Ending",
    "Engine",
    "EngineParams",
    "Run",
    "SamplingParams",
    "SpeculationConfig",
    "Status",
    "TextChunk",
    "TreeShape",
    "__version__",
    "admit",
    "check_prompts",
    "decode",
    "init_state",
    "load",
    "make_controls",
    "make_mesh",
    "make_sampling",
    "prefill",
    "release",
]
