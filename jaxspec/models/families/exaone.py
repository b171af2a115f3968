"""EXAONE 4, and K-EXAONE, whose layers have experts and norms at other places."""

import dataclasses

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    dense_of,
    model_of,
    mtp_of,
    sizes,
)
from jaxspec.models.families.rope import rope_of, without_rope
from jaxspec.models.families.routed import by_kind, sigmoid_routing
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import shown


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


def _windows(hf: Keys) -> tuple[int | None, ...]:
    """A window or None for each layer, by its kind or else by the pattern."""
    window, every = window_of(hf), hf["sliding_window_pattern"]
    count = range(1, hf["num_hidden_layers"] + 1)
    return windows_by_kind(hf, [SLIDING if window and index % every else FULL for index in count])


def _attention(hf: Keys, window: int | None) -> AttentionConfig:
    """Norms of queries and keys. Layers without windows do not rotate, beside layers with them."""
    rope = rope_of(hf)
    rotated = rope if window or window_of(hf) is None else without_rope(rope)
    return dataclasses.replace(attention_of(hf, rotated, window), qk_norm=True)


def _read_exaone4(hf: Keys) -> ModelConfig:
    """Norms after mixer and MLP."""
    mixers = (_attention(hf, window) for window in _windows(hf))
    return model_of(hf, [LayerConfig(mixer, dense_of(hf), norms="after") for mixer in mixers])


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    _read_exaone4,
    defaults=sizes(102400, 4096, 16384, 32, 32, 32, 2048)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096}
    | {"sliding_window_pattern": 4, "layer_types": None},
    rewrite=_pattern_in_numbers,
)


def _read_exaone4_5(hf: Keys) -> ModelConfig:
    """EXAONE 4 with MTP layers named as Qwen's. They are like the model's first layers, with norms
    after mixer and MLP, as exaone4_5_mtp.py of vLLM and of SGLang have the one published. Raises
    ValueError for more of them than the model has layers."""
    model, mtp = _read_exaone4(hf), mtp_of(hf, "qwen", AFTER)
    if mtp is not None:
        if mtp.num_layers > len(model.layers):
            raise ValueError(
                f"num_nextn_predict_layers {mtp.num_layers}: the model, whose first layers MTP "
                f"layers are like, has {len(model.layers)}"
            )
        mtp = dataclasses.replace(mtp, layers=model.layers[: mtp.num_layers])
    return dataclasses.replace(model, mtp=mtp)


EXAONE4_5_TEXT = dataclasses.replace(
    EXAONE4, read=_read_exaone4_5, defaults={**EXAONE4.defaults, "num_nextn_predict_layers": 1}
)


def _kinds_of_mlps(raw: Keys) -> Keys:
    """K-EXAONE's config, where ``is_moe_layer`` says of each layer whether it has experts. Raises
    ValueError for what is no list of flags, and beside another list that says something else."""
    raw = _pattern_in_numbers(raw)
    flags = raw.get("is_moe_layer")
    if flags is None:
        return raw
    if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(f"is_moe_layer must be a list of true and false, got {shown(flags)}")
    kinds = ["sparse" if flag else "dense" for flag in flags]
    if raw.get("mlp_layer_types") not in (None, kinds):
        raise ValueError("is_moe_layer contradicts mlp_layer_types: remove one of them")
    return {**raw, "mlp_layer_types": kinds}


def _mtp(hf: Keys) -> MtpConfig | None:
    """MTP layers as Qwen's, with dense MLPs, as exaone_moe_mtp.py of vLLM has them. Raises
    ValueError for kinds that are not those of as many layers."""
    mtp = mtp_of(hf, "qwen", AFTER)
    if mtp is None:
        return None
    given = hf["mtp_layer_types"]
    kinds = [FULL] * mtp.num_layers if given is None else given
    if not isinstance(kinds, list) or set(kinds) - {FULL, SLIDING} or len(kinds) != mtp.num_layers:
        raise ValueError(
            f"mtp_layer_types must be {mtp.num_layers} of {FULL} and {SLIDING}, got {shown(kinds)}"
        )
    windows = (window_of(hf) if kind == SLIDING else None for kind in kinds)
    layers = tuple(LayerConfig(_attention(hf, window), dense_of(hf)) for window in windows)
    return dataclasses.replace(mtp, layers=layers)


def _read_exaone_moe(hf: Keys) -> ModelConfig:
    """Norms before mixer and MLP; experts as DeepSeek-V3 has them."""
    width, routing = hf["moe_intermediate_size"], sigmoid_routing(hf, hf["num_experts"])
    experts = ExpertsConfig(width, routing, shared_size=hf["num_shared_experts"] * width)
    dense, has_experts = dense_of(hf), by_kind(hf)
    mixers = (_attention(hf, window) for window in _windows(hf))
    layers = [
        LayerConfig(mixer, experts if has_experts(index) else dense)
        for index, mixer in enumerate(mixers)
    ]
    return dataclasses.replace(model_of(hf, layers), mtp=_mtp(hf))


EXAONE_MOE = Family(
    "ExaoneMoeForCausalLM",
    _read_exaone_moe,
    keys=words("is_moe_layer first_last_k_dense_replace"),  # of the latter nothing is computed
    defaults=dict(EXAONE4.defaults)
    | {"eos_token_id": 53, "mlp_layer_types": None, "first_k_dense_replace": 1}
    | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}
    | {"num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    | {"n_group": 1, "topk_group": 1, "mtp_layer_types": None},
    fixed={"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
    # Limits of activations and windows by layer, which exaone_moe.py of vLLM knows.
    | dict.fromkeys(("swiglu_limits", "sliding_windows", "mtp_sliding_windows"), (None,)),
    rewrite=_kinds_of_mlps,
    published_as="ExaoneMoEForCausalLM",
    renames=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),),
)
