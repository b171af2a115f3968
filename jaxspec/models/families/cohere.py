"""Cohere 2 (Command R7B, Command A): mixer and MLP side by side, and LayerNorm without biases."""

import dataclasses

from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    dense_of,
    model_of,
    sizes,
)
from jaxspec.models.families.rope import rope_of, without_rope
from jaxspec.models.families.windows import windows_of_most
from jaxspec.models.json.keys import words


def _read(hf: Keys) -> ModelConfig:
    """Layers without windows do not rotate."""
    rope, every = rope_of(hf), hf["sliding_window_pattern"]
    check_agrees(hf, "layer_switch", every, "sliding_window_pattern")
    layers = []
    for window in windows_of_most(hf, every):
        attention = attention_of(hf, without_rope(rope) if window is None else rope, window)
        attention = dataclasses.replace(attention, interleaved=window is not None)
        layers.append(LayerConfig(attention, dense_of(hf), norms="shared", centred=True))
    model = model_of({**hf, "rms_norm_eps": hf["layer_norm_eps"]}, layers)
    return dataclasses.replace(model, logit_divisor=1 / hf["logit_scale"])


COHERE2 = Family(
    "Cohere2ForCausalLM",
    _read,
    keys=words("attention_bias cache_implementation"),
    defaults=sizes(256000, 8192, 22528, 40, 64, 64, 8192)
    | {"num_key_value_heads": None, "layer_norm_eps": 1e-5, "logit_scale": 0.0625}
    | {"eos_token_id": 255001, "tie_word_embeddings": True, "sliding_window": 4096}
    | {"sliding_window_pattern": 4, "layer_types": None, "layer_switch": None},
    fixed={
        "rms_norm_eps": (None,),  # it is layer_norm_eps
        "order_of_interleaved_layers": (None, "local_attn_first"),
        "position_embedding_type": (None, "rope_gptj"),
        "rotary_pct": (None, 1.0),
        "use_embedding_sharing": (None, True),
        "use_gated_activation": (None, True),
        "use_parallel_block": (None, True),
        "use_parallel_embedding": (None, False),
        "use_qk_norm": (None, False),
    },
)
