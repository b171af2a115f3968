"""Which fields of a GGUF file are read, which may be there, and which are not supported."""

import math
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.checkpoints.gguf.metadata import Metadata, gguf
from jaxspec.models.json.keys import words

# Fields that are read, or say what others say, or are for other programs.
_KNOWN = words(
    """block_count embedding_length feed_forward_length context_length vocab_size
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.sliding_window
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.finetuned
    expert_count expert_used_count expert_feed_forward_length tensor_data_layout"""
)
# Fields that llama.cpp computes with, with their values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "logit_scale": (0, 1),
        "embedding_scale": (0, 1),
        "residual_scale": (0, 1),
        "attention.output_scale": (0, 1),
        "attention.temperature_length": (0,),
        "attention.temperature_scale": (0,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.causal": (True,),
        "attention.shared_kv_layers": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "router_logit_softcapping": (0,),
        "use_parallel_residual": (False,),
        "pooling_type": (0,),
        "nextn_predict_layers": (0,),
        "leading_dense_block_count": (0,),
        "interleave_moe_layer_step": (1,),
        "moe_every_n_layers": (0, 1),
        "expert_shared_count": (0,),
        "expert_shared_feed_forward_length": (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "expert_weights_norm": (True,),
        "expert_gating_func": (0, 1),  # not said, or softmax
        "rope.scaling.yarn_ext_factor": (-1, 1),
        "rope.scaling.yarn_attn_factor": (1,),
        "rope.scaling.yarn_beta_fast": (32,),
        "rope.scaling.yarn_beta_slow": (1,),
        "rope.scaling.yarn_log_multiplier": (0,),
    }
)
# Of Gemma 3 these are not in most files.
_OF_GEMMA3: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"attention.sliding_window_pattern": (6,), "rope.freq_base_swa": (10000,)}
)
_MOST_SHOWN = 40  # characters of a value


def check_fields(metadata: Metadata) -> None:
    """Raise one ValueError that lists all fields which are not supported. Warns of those that
    nobody knows."""
    given = _fields(metadata)
    if problems := list(_problems(metadata, given)):
        raise ValueError(
            f"not supported: {'; '.join(problems)}. Take the checkpoint in safetensors"
        )
    if others := sorted(given.keys() - _KNOWN - _declared()):
        warnings.warn(
            f"{metadata.files[0]} has fields that are not read: {', '.join(others)}", stacklevel=2
        )


def head_dim(metadata: Metadata) -> int:
    if (given := metadata.get("attention.key_length")) is not None:
        return given
    if metadata.architecture in ("llama", "mistral") and metadata.get("rope.dimension_count"):
        return metadata.get("rope.dimension_count")
    return metadata.get("embedding_length") // metadata.get("attention.head_count")


def _fields(metadata: Metadata) -> dict[str, Any]:
    """The fields of the architecture, without its name."""
    prefix = f"{metadata.architecture}."
    return {
        name.removeprefix(prefix): value
        for name, value in metadata.fields.items()
        if name.startswith(prefix)
    }


def _problems(metadata: Metadata, given: Mapping[str, Any]) -> Iterator[str]:
    """What changes a model and is not computed."""
    width = head_dim(metadata)
    neutral = {**_NEUTRAL, "attention.scale": (0, 1 / math.sqrt(width))}
    if metadata.architecture == "gemma3":
        neutral |= _OF_GEMMA3
    neutral |= {"attention.value_length": (width,)}
    if metadata.architecture != "phi3":  # whose heads may be rotated in part
        neutral["rope.dimension_count"] = (width,)
    if "rope_factors_long.weight" not in metadata.tensors:  # which have a factor of their own
        neutral["rope.scaling.attn_factor"] = (1,)
    for name in sorted(given.keys() & (neutral.keys() | (_declared() - _KNOWN))):
        expected = neutral.get(name, ())
        if any(_same(given[name], value) for value in expected):
            continue
        only = f" (only {' or '.join(map(_shown, expected))})" if expected else ""
        yield f"{name} {str(given[name])[:_MOST_SHOWN]}{only}"


def _same(given: Any, value: float) -> bool:
    """Whether a number of a file, of 32 bits, is the value."""
    return isinstance(given, int | float) and math.isclose(given, value, rel_tol=1e-6)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.6g}"


def _declared() -> frozenset[str]:
    """Fields that some architecture of llama.cpp has, as the package gguf lists them."""
    keys = gguf.Keys
    names = (
        name
        for group in (keys.LLM, keys.Attention, keys.Rope)
        for name in vars(group).values()
        if isinstance(name, str)
    )
    return frozenset(name.removeprefix("{arch}.") for name in names if name.startswith("{arch}."))
