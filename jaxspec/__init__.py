"""Speculative decoding for JAX: draft, tree-verify and accept in one compiled program."""

from typing import TYPE_CHECKING

from jaxspec._lazy import lazy_names

if TYPE_CHECKING:  # what a type checker sees; at run time a name loads its module when asked for
    from jaxspec._version import __version__
    from jaxspec.checkpoints.built_in import BUILT_IN_HEAD, BUILT_IN_MODEL
    from jaxspec.checkpoints.check_against import check_against
    from jaxspec.checkpoints.from_nnx import Lora, from_nnx
    from jaxspec.checkpoints.load import load
    from jaxspec.config.cache import CacheConfig
    from jaxspec.config.engine import EngineConfig
    from jaxspec.config.reasoning import ReasoningBudget
    from jaxspec.config.sampling_params import SamplingParams
    from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
    from jaxspec.decoding import functional as functional
    from jaxspec.decoding.choose_shape import choose_shape
    from jaxspec.decoding.functional import (
        EngineParams,
        Samples,
        admit,
        decode,
        init_state,
        prefill,
        prefill_all,
        release,
        right_padded,
        sample,
        split_padded,
    )
    from jaxspec.decoding.sampling import make_controls, make_sampling
    from jaxspec.decoding.seeds import group_seeds
    from jaxspec.decoding.state import Ending, Status
    from jaxspec.decoding.token_logprobs import token_logprobs
    from jaxspec.engine.async_engine import AsyncEngine
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.generation import ErrorKind, Generation
    from jaxspec.llm.async_llm import AsyncLLM
    from jaxspec.llm.completion import Completion, TextChunk
    from jaxspec.llm.llm import LLM
    from jaxspec.llm.prompt_checks import check_prompts
    from jaxspec.models.forward import forward, hidden_states
    from jaxspec.parallel import make_mesh

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "jaxspec.engine.async_engine": ("AsyncEngine",),
        "jaxspec.llm.async_llm": ("AsyncLLM",),
        "jaxspec.checkpoints.built_in": ("BUILT_IN_HEAD", "BUILT_IN_MODEL"),
        "jaxspec.llm.completion": ("Completion", "TextChunk"),
        "jaxspec.config.cache": ("CacheConfig",),
        "jaxspec.config.engine": ("EngineConfig",),
        "jaxspec.config.speculation": ("PLAIN", "SpeculationConfig", "TreeShape"),
        "jaxspec.decoding.choose_shape": ("choose_shape",),
        "jaxspec.engine.engine": ("Engine",),
        "jaxspec.functional": (
            *("EngineParams", "admit", "decode", "init_state", "prefill", "prefill_all", "release"),
            *("Samples", "right_padded", "sample", "split_padded"),
        ),
        "jaxspec.engine.generation": ("ErrorKind", "Generation"),
        "jaxspec.llm.llm": ("LLM",),
        "jaxspec.checkpoints.load": ("load",),
        "jaxspec.checkpoints.check_against": ("check_against",),
        "jaxspec.checkpoints.from_nnx": ("Lora", "from_nnx"),
        "jaxspec.decoding.sampling": ("make_controls", "make_sampling"),
        "jaxspec.llm.prompt_checks": ("check_prompts",),
        "jaxspec.models.forward": ("forward", "hidden_states"),
        "jaxspec.config.reasoning": ("ReasoningBudget",),
        "jaxspec.config.sampling_params": ("SamplingParams",),
        "jaxspec.parallel": ("make_mesh",),
        "jaxspec.decoding.seeds": ("group_seeds",),
        "jaxspec.decoding.state": ("Ending", "Status"),
        "jaxspec.decoding.token_logprobs": ("token_logprobs",),
        "jaxspec._version": ("__version__",),
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
    "Lora",
    "ReasoningBudget",
    "Samples",
    "SamplingParams",
    "SpeculationConfig",
    "Status",
    "TextChunk",
    "TreeShape",
    "__version__",
    "admit",
    "check_against",
    "check_prompts",
    "choose_shape",
    "decode",
    "forward",
    "from_nnx",
    "group_seeds",
    "hidden_states",
    "init_state",
    "load",
    "make_controls",
    "make_mesh",
    "make_sampling",
    "prefill",
    "prefill_all",
    "release",
    "right_padded",
    "sample",
    "split_padded",
    "token_logprobs",
]
