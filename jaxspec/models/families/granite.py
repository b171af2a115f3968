"""Granite 3 and later, dense: Llama with four multipliers."""

import dataclasses

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.json.keys import words


def _read(hf: Keys) -> ModelConfig:
    bias, scale = hf["attention_bias"], float(hf["attention_multiplier"])
    plain = attention_of(hf, rope_of(hf))
    attention = dataclasses.replace(plain, qkv_bias=bias, o_bias=bias, scale=scale)
    mlp = DenseConfig(hf["intermediate_size"], hf["mlp_bias"])
    layer = LayerConfig(attention, mlp, residual_scale=float(hf["residual_multiplier"]))
    return dataclasses.replace(
        model_of(hf, [layer] * hf["num_hidden_layers"]),
        embed_scale=float(hf["embedding_multiplier"]),
        logit_divisor=float(hf["logits_scaling"]),
    )


_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE = Family(
    "GraniteForCausalLM",
    _read,
    keys=words("attention_bias mlp_bias") | _MULTIPLIERS.keys(),
    defaults=_MULTIPLIERS | {"intermediate_size": 11008, "max_position_embeddings": 2048},
)
