"""Families without experts whose layers are those of others under other names.

They are Seed-OSS, the text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, Ministral 8B, Ministral 3,
AFM of Arcee, and Youtu-LLM. A family here is a row: what it is like, transformers'
defaults of absent keys, and what is rewritten.
"""

import dataclasses

from jaxspec.config.experts import SquaredRelu
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.dense import MISTRAL, QWEN2, QWEN3
from jaxspec.models.families.family import Family, Keys, attention_of, dense_of, model_of, sizes
from jaxspec.models.families.rope import (
    BETA_INSIDE,
    SCALES_QUERIES,
    rope_of,
    with_scaled_queries,
    without_image_positions,
)
from jaxspec.models.families.routed import DEEPSEEK_V3, latent_of
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.keys import words


def _alike(hf: Keys, attention: AttentionConfig) -> ModelConfig:
    """A model whose layers are all the same."""
    return model_of(hf, [LayerConfig(attention, dense_of(hf))] * hf["num_hidden_layers"])


def _read_seed_oss(hf: Keys) -> ModelConfig:
    plain = attention_of(hf, rope_of(hf))
    return _alike(hf, dataclasses.replace(plain, o_bias=hf["attention_out_bias"]))


SEED_OSS = Family(
    "SeedOssForCausalLM",
    _read_seed_oss,
    keys=words("mlp_bias residual_dropout"),
    defaults=sizes(155136, 4096, 27648, 64, 80, 8, 524288)
    | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
)

_QWEN_VL = (
    dict(QWEN2.defaults)
    | sizes(152064, 8192, 29568, 80, 64, 8, 32768)
    | {"max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 151645}
)
QWEN2_VL_TEXT = Family(
    "Qwen2VLForCausalLM", QWEN2.read, defaults=_QWEN_VL, rewrite=without_image_positions
)
QWEN2_5_VL_TEXT = dataclasses.replace(QWEN2_VL_TEXT, architecture="Qwen2_5_VLForCausalLM")
QWEN3_VL_TEXT = Family(
    "Qwen3VLForCausalLM",
    QWEN3.read,
    keys=QWEN3.keys,
    defaults=dict(QWEN3.defaults)
    | sizes(151936, 4096, 22016, 32, 32, 32, 128000)
    | {"rope_theta": 500_000.0},
    fixed={"use_sliding_window": (None, False)},
    rewrite=without_image_positions,
)


def _read_ministral(hf: Keys) -> ModelConfig:
    """A Mistral whose layers differ in their windows."""
    default = FULL if window_of(hf) is None else SLIDING
    windows = windows_by_kind(hf, [default] * hf["num_hidden_layers"])
    mixers = (attention_of(hf, rope_of(hf), window) for window in windows)
    return model_of(hf, [LayerConfig(mixer, dense_of(hf)) for mixer in mixers])


MINISTRAL = Family(
    "MinistralForCausalLM",
    _read_ministral,
    defaults=dict(MISTRAL.defaults) | {"layer_types": None},
)


def _read_arcee(hf: Keys) -> ModelConfig:
    """A Llama whose MLPs have no gate."""
    mlp = dataclasses.replace(dense_of(hf), activation=SquaredRelu())
    layer = LayerConfig(attention_of(hf, rope_of(hf)), mlp)
    return model_of(hf, [layer] * hf["num_hidden_layers"])


ARCEE = Family(
    "ArceeForCausalLM",
    _read_arcee,
    keys=words("attention_bias mlp_bias"),
    defaults=sizes(32000, 2560, 18432, 32, 32, 32, 4096)
    | {"num_key_value_heads": None, "rms_norm_eps": 1e-5, "eos_token_id": 128001},
    fixed={"hidden_act": ("relu2",)},
)

MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    MISTRAL.read,
    defaults=sizes(131072, 4096, 14336, 34, 32, 8, 262144)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None, **SCALES_QUERIES},
    fixed=BETA_INSIDE,
    rewrite=lambda raw: with_scaled_queries(raw, factor=16.0, original=16384, theta=1e6),
)


def _read_youtu(hf: Keys) -> ModelConfig:
    """DeepSeek-V3's attention, and dense MLPs."""
    return model_of(hf, [LayerConfig(latent_of(hf), dense_of(hf))] * hf["num_hidden_layers"])


_OF_LATENTS = words("kv_lora_rank q_lora_rank qk_head_dim rope_interleave")
YOUTU = Family(
    "YoutuForCausalLM",
    _read_youtu,
    keys=words("attention_bias embedding_initializer_range"),
    defaults={key: value for key, value in DEEPSEEK_V3.defaults.items() if key in _OF_LATENTS}
    | sizes(128256, 2048, 6144, 32, 16, 16, 131072)
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"eos_token_id": 128001, "tie_word_embeddings": True},
)
