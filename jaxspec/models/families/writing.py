"""What families share when they write a ``config.json``."""

import dataclasses
from typing import Any

from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.rope import written_rope


def alike(config: ModelConfig) -> tuple[AttentionConfig, DenseConfig]:
    """The configs that all layers share, except for the windows.

    Raises ValueError for layers that differ in more, or are of kinds that no family which is
    written has.
    """
    layers = config.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
    mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, DenseConfig)]
    if not len(mixers) == len(mlps) == len(layers):
        raise ValueError("no config.json is written for models with layers of such kinds")
    windowless = (dataclasses.replace(mixer, window=None) for mixer in mixers)
    kinds = set(zip(windowless, mlps, strict=True))
    if len(kinds) != 1:
        raise ValueError("no supported Hugging Face family has layers that differ in this way")
    return kinds.pop()


def windows_of(config: ModelConfig) -> list[int | None]:
    """The window of each layer; None: it has none."""
    return [layer.attention.window for layer in config.layers]


def common_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys that all families write alike.

    Raises ValueError for layers that differ (see ``alike``).
    """
    stop, (attention, mlp) = list(config.stop_token_ids), alike(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        **written_rope(attention.rope),
        "bos_token_id": None,
        "eos_token_id": stop[0] if len(stop) == 1 else stop or None,
    }
