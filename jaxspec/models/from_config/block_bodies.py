"""The layers of a block head: Qwen3's, and what MiMo's have besides.

MiMo rotates a part of each head, multiplies values by a number, and gives each query head a score
for attending to nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.rope import PARTIAL, rotary_dim
from jaxspec.models.from_config.head_keys import layer_keys
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import check_flag, is_positive_number, shown

SCALE, SINKS, SINKS_BESIDE = (
    "attention_value_scale",
    "attention_sink_bias",
    "add_swa_attention_sink_bias",  # at the top level of later files
)
# In dflash_config. The last ones are of the training, and of the target.
BODY_KEYS = words(f"{SCALE} {SINKS} num_anchors loss_decay_gamma backbone_rotary_base")


def block_layers(raw: Mapping[str, Any], options: Mapping[str, Any]) -> ModelConfig:
    """The layers without their windows. Raises ValueError for those that are not supported."""
    if raw.get("model_type") != "qwen3":
        given = shown(raw.get("model_type"))
        raise ValueError(f"model_type {given} is not supported for a block drafter, only 'qwen3'")
    layers = layer_keys(raw) | {"model_type": "qwen3", "eos_token_id": None}
    share = layers.pop(PARTIAL, None)
    model = parse_model_config(layers)
    scale, width = options.get(SCALE), raw.get("v_head_dim")
    if scale is not None and not is_positive_number(scale):
        raise ValueError(f"{SCALE} must be a number above 0, got {shown(scale)}")
    if width not in (None, model.layers[0].attention.head_dim):
        raise ValueError(f"v_head_dim {shown(width)} is not supported, only head_dim")
    sinks = any(check_flag(key, options.get(key, False)) for key in (SINKS, SINKS_BESIDE))

    def changed(layer: LayerConfig) -> LayerConfig:
        mixer = layer.attention
        rotary = rotary_dim({PARTIAL: share, "rope_type": "default"}, mixer.head_dim)
        rope = dataclasses.replace(mixer.rope, rotary_dim=rotary)
        # Sums of values times a number are the values' own sums times it.
        factor = 1.0 if scale is None else float(scale)
        mixer = dataclasses.replace(mixer, rope=rope, sinks=sinks, out_multiplier=factor)
        return dataclasses.replace(layer, mixer=mixer)

    return model.map_layers(changed)
