"""Hunyuan, dense: norms of queries and keys after their rotation, whose base alpha moves."""

import dataclasses

from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_keys,
    dense_of,
    head_dim,
    model_of,
    sizes,
)
from jaxspec.models.families.rope import rope_of
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_number, shown

# Those of published files. ``factor`` and those after it have no effect beside alpha.
_DYNAMIC = words("rope_type type rope_theta alpha factor beta_fast beta_slow mscale mscale_all_dim")


def _with_moved_base(hf: Keys) -> Keys:
    """The keys with plain rope in place of ``dynamic`` rope with alpha: whatever the length, its
    base is rope_theta alpha^(D / (D - 2))."""
    given = hf["rope_scaling"] or hf["rope_parameters"]
    if not isinstance(given, dict) or given.get("rope_type", given.get("type")) != "dynamic":
        return hf
    alpha, width = given.get("alpha"), head_dim(hf)
    if not alpha:
        rest = {key: value for key, value in given.items() if key != "alpha"}
        return {**hf, "rope_scaling": None, "rope_parameters": rest}
    check_keys(given, _DYNAMIC, {}, "rope parameters of 'dynamic' with alpha")
    theta = given.get("rope_theta", hf["rope_theta"])
    if not is_positive_number(alpha) or not is_positive_number(theta) or width < 4:
        raise ValueError(
            "rope parameters of 'dynamic': alpha and rope_theta must be numbers above 0, and heads "
            f"at least 4 wide, got {shown(alpha)}, {shown(theta)} and {width}"
        )
    moved = {"rope_type": "default", "rope_theta": theta * alpha ** (width / (width - 2))}
    return {**hf, "rope_scaling": None, "rope_parameters": moved}


def _read(hf: Keys) -> ModelConfig:
    plain = attention_of(hf, rope_of(_with_moved_base(hf)))
    attention = dataclasses.replace(plain, qk_norm=True, norm_after_rope=True)
    return model_of(hf, [LayerConfig(attention, dense_of(hf))] * hf["num_hidden_layers"])


HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    _read,
    keys=words("attention_bias attention_head_dim org_vocab_size cla_share_factor"),
    defaults=sizes(290943, 4096, 11008, 32, 32, 32, 2048)
    | {"num_key_value_heads": None, "rms_norm_eps": 1e-5},
    fixed={
        "use_cla": (None, False),
        "use_qk_norm": (None, True),
        "use_rotary_pos_emb": (None, True),
        "norm_type": (None, "rms"),
    },
    renames=(
        (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    ),
)
