"""The fields of a GGUF file as the contents of a ``config.json``.

Facts of architectures that llama.cpp has in its code and not in files are here, too: those of
Gemma 3's windows and scale, and that Qwen 3's experts are weighted to a sum of 1.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxspec.checkpoints.gguf.fields import check_fields, head_dim
from jaxspec.checkpoints.gguf.metadata import Metadata
from jaxspec.checkpoints.gguf.tensors import WidenedTensor


def config_of(metadata: Metadata) -> dict[str, Any]:
    """The contents of config.json. Warns of fields that nobody knows.

    Raises ValueError for an architecture that is not supported, and lists fields of the file that
    are missing, or not supported.
    """
    architecture = metadata.architecture
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ValueError(
            f"architecture {architecture!r} is not supported as GGUF; supported are {supported}: "
            "take the checkpoint in safetensors"
        )
    needed = ("block_count", "embedding_length", "attention.head_count", "context_length")
    if missing := [f"{architecture}.{name}" for name in needed if metadata.get(name) is None]:
        raise ValueError(f"fields are missing: {', '.join(missing)}")
    check_fields(metadata)
    config = _common(metadata) | _ARCHITECTURES[architecture](metadata)
    return {name: value for name, value in config.items() if value is not None}


def _common(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.get("attention.head_count")
    tokens = metadata.tensors["token_embd.weight"].shape[0]
    return {
        "hidden_size": metadata.get("embedding_length"),
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_hidden_layers": metadata.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_dim(metadata),
        "rms_norm_eps": _float(metadata.get("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": metadata.get("context_length"),
        "rope_theta": _float(metadata.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata),
        "vocab_size": tokens,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.token_field("bos_token_id"),
        "eos_token_id": _stops(metadata),
    }


def _stops(metadata: Metadata) -> list[int] | None:
    """The tokens that end a text, a turn or a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.token_field(name) for name in names]
    return [stop for stop in dict.fromkeys(found) if stop is not None] or None


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """By the fields, or by the tables that some architectures have as tensors.

    Llama 3's table has the divisor of each frequency; its four numbers are not in the file.
    """
    original = metadata.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in metadata.tensors:
        divisors = _table(metadata, "rope_freqs.weight")
        return _by_frequency(divisors, divisors) | {"attention_factor": 1.0}
    if "rope_factors_long.weight" in metadata.tensors:
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        given = {"original_max_position_embeddings": original}
        return _by_frequency(*(_table(metadata, name) for name in names)) | given
    kind = metadata.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported without a table of factors")
    scaling = {"rope_type": kind, "factor": _float(metadata.get("rope.scaling.factor"))}
    return scaling | ({"original_max_position_embeddings": original} if kind == "yarn" else {})


def _float(value: Any) -> float | None:
    """A number that the file has as float32, as it was written: 1e-6 is not 9.99999997e-07."""
    return None if value is None else float(str(np.float32(value)))


def _by_frequency(short: list[float], long: list[float]) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def _table(metadata: Metadata, name: str) -> list[float]:
    blocks = metadata.tensors[name]
    file = metadata.files[blocks.file]
    return WidenedTensor(file, name, blocks.shape, blocks.offset, blocks.kind).read().tolist()


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Mistral's files have this architecture, too: with windows they are read as its own."""
    if metadata.get("expert_count"):
        raise ValueError("experts of the architecture llama (Mixtral) are not read from GGUF")
    if (window := metadata.get("attention.sliding_window")) is not None:
        return _mistral(metadata) | {"sliding_window": window}
    bias = "blk.0.attn_q.bias" in metadata.tensors
    return _of("llama", "LlamaForCausalLM") | {"attention_bias": bias}


def _mistral(metadata: Metadata) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window")
    return _of("mistral", "MistralForCausalLM") | {"sliding_window": window}


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return _of("qwen2", "Qwen2ForCausalLM")


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return _of("qwen3", "Qwen3ForCausalLM")


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return _of("qwen3_moe", "Qwen3MoeForCausalLM") | {
        "num_experts": metadata.get("expert_count"),
        "num_experts_per_tok": metadata.get("expert_used_count"),
        "moe_intermediate_size": metadata.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Scores of the 27B are scaled by its hidden size: it alone has 62 layers."""
    scaled_by = head_dim(metadata)
    if metadata.get("block_count") == 62:
        scaled_by = metadata.get("embedding_length") // metadata.get("attention.head_count")
    return _of("gemma3_text", "Gemma3ForCausalLM") | {
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": metadata.get("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    share = metadata.get("rope.dimension_count", head_dim(metadata)) / head_dim(metadata)
    return _of("phi3", "Phi3ForCausalLM") | {
        "partial_rotary_factor": share,
        "sliding_window": metadata.get("attention.sliding_window"),
    }


def _of(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


_ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3_moe,
        "gemma3": _gemma3,
        "phi3": _phi3,
    }
)
