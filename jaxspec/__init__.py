"""Speculative decoding for JAX: draft, tree-verify and accept in one compiled program."""

from typing import TYPE_CHECKING

from jaxspec.lazy import lazy_names

if TYPE_CHECKING:  # what a type checker sees; at run time a name loads its module when asked for
    from jaxspec.async_engine import AsyncEngine
    from jaxspec.async_llm import AsyncLLM
    from jaxspec.built_in import BUILT_IN_HEAD, BUILT_IN_MODEL
    from jaxspec.completion import Completion, TextChunk
    from jaxspec.config.cache import CacheConfig
    from jaxspec.config.engine import EngineConfig
    from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
    from jaxspec.engine import Engine
    from jaxspec.functional import (
        EngineParams,
        admit,
        decode,
        init_state,
        prefill,
        prefill_all,
        release,
    )
    from jaxspec.generation import ErrorKind, Generation
    from jaxspec.llm import LLM
    from jaxspec.loading import load
    from jaxspec.parallel import make_mesh
    from jaxspec.prompt_checks import check_prompts
    from jaxspec.sampling import make_controls, make_sampling
    from jaxspec.scheduling.requests import SamplingParams
    from jaxspec.state import Ending, Status
    from jaxspec.version import __version__

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "jaxspec.async_engine": ("AsyncEngine",),
        "jaxspec.async_llm": ("AsyncLLM",),
        "jaxspec.built_in": ("BUILT_IN_HEAD", "BUILT_IN_MODEL"),
        "jaxspec.completion": ("Completion", "TextChunk"),
        "jaxspec.config.cache": ("CacheConfig",),
        "jaxspec.config.engine": ("EngineConfig",),
        "jaxspec.config.speculation": ("PLAIN", "SpeculationConfig", "TreeShape"),
        "jaxspec.engine": ("Engine",),
        "jaxspec.functional": (
            *("EngineParams", "admit", "decode", "init_state", "prefill", "prefill_all", "release"),
        ),
        "jaxspec.generation": ("ErrorKind", "Generation"),
        "jaxspec.llm": ("LLM",),
        "jaxspec.loading": ("load",),
        "jaxspec.sampling": ("make_controls", "make_sampling"),
        "jaxspec.prompt_checks": ("check_prompts",),
        "jaxspec.scheduling.requests": ("SamplingParams",),
        "jaxspec.parallel": ("make_mesh",),
        "jaxspec.state": ("Ending", "Status"),
        "jaxspec.version": ("__version__",),
    },
)

__all__ = [
    "BUILT_IN_HEAD",
    "BUILT_IN_MODEL",
    "LLM",
    "PLAIN",
    "AsyncEngine",
    "AsyncLLM",
    "CacheConfig",
    "Completion",
    "Ending",
    "Engine",
    "EngineConfig",
    "EngineParams",
    "ErrorKind",
    "Generation",
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
    "prefill_all",
    "release",
]
