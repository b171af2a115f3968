"""Families without experts whose layers are those of others under other names.

They are Seed-OSS, the text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, Ministral 3, ERNIE 4.5
and EXAONE 4. A family here is a row: what it is like,
transformers' defaults of absent keys, and what is rewritten.
"""

import dataclasses

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
    without_rope,
)
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import shown


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

MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    MISTRAL.read,
    defaults=sizes(131072, 4096, 14336, 34, 32, 8, 262144)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None, **SCALES_QUERIES},
    fixed=BETA_INSIDE,
    rewrite=lambda raw: with_scaled_queries(raw, factor=16.0, original=16384, theta=1e6),
)


def with_all_biases(raw: Keys) -> Keys:
    """ERNIE's one key for the biases of attention and MLPs, as two."""
    bias = raw.get("use_bias", False)
    return {**raw, "attention_bias": bias, "mlp_bias": bias}


def _read_ernie(hf: Keys) -> ModelConfig:
    return _alike(hf, dataclasses.replace(attention_of(hf, rope_of(hf)), interleaved=True))


ERNIE4_5 = Family(
    "Ernie4_5ForCausalLM",
    _read_ernie,
    keys=words("use_bias"),
    defaults=sizes(103424, 1024, 3072, 18, 16, 2, 131072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    | {"tie_word_embeddings": True},
    rewrite=with_all_biases,
)


def _pattern_in_numbers(raw: Keys) -> Keys:
    """EXAONE's config, where a pattern such as LLLG is the number of its letters: all layers but
    the last of so many have windows. Raises ValueError for other patterns."""
    pattern = raw.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if set(pattern[:-1]) - {"L"} or not pattern.endswith("G"):
            raise ValueError(f"sliding_window_pattern {shown(pattern)} is not supported, only LLLG")
        return {**raw, "sliding_window_pattern": len(pattern)}
    # What transformers writes for a model without windows.
    unused = raw.get("sliding_window", 0) is None and pattern in (0, None)
    return {**raw, "sliding_window_pattern": 1} if unused else raw


def _read_exaone4(hf: Keys) -> ModelConfig:
    """Norms after mixer and MLP. Layers without windows do not rotate, beside layers with them."""
    rope, window, every = rope_of(hf), window_of(hf), hf["sliding_window_pattern"]
    count = range(1, hf["num_hidden_layers"] + 1)
    kinds = [SLIDING if window and index % every else FULL for index in count]
    layers = []
    for size in windows_by_kind(hf, kinds):
        rotated = rope if size or window is None else without_rope(rope)
        attention = dataclasses.replace(attention_of(hf, rotated, size), qk_norm=True)
        layers.append(LayerConfig(attention, dense_of(hf), norms="after"))
    return model_of(hf, layers)


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    _read_exaone4,
    defaults=sizes(102400, 4096, 16384, 32, 32, 32, 2048)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096}
    | {"sliding_window_pattern": 4, "layer_types": None},
    rewrite=_pattern_in_numbers,
)
