"""DeepSeek-V4: attention to a window and to entries of spans of tokens, several residual streams,
and experts that in the first layers are those of a token's id."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from jaxspec.config.entries import EntryAttentionConfig, EntryIndexerConfig, SpansConfig
from jaxspec.config.experts import BoundedSwiglu, ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import BEFORE
from jaxspec.config.rope import RopeConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.models.families.family import Family, Keys, check_agrees, model_of, mtp_of, sizes
from jaxspec.models.families.rope import PARTIAL, rope_from
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, is_positive_number, shown

WINDOW, SPARSE, ALL = (
    *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
)
# Kinds of layers as published files number them: tokens of a span that an entry stands for.
_RATIOS = MappingProxyType({0: WINDOW, 4: SPARSE, 128: ALL})
_BY_ID, _CHOSEN = "hash_moe", "moe"
_SIZES = words(
    """head_dim q_lora_rank sliding_window o_groups o_lora_rank index_topk index_n_heads
    index_head_dim hc_mult hc_sinkhorn_iters"""
)


def _list_of(hf: Keys, name: str, allowed: Sequence[Any], count: int) -> list[Any]:
    """A key's list of ``count`` or more entries. Raises ValueError for what is none."""
    given = hf[name]
    if not isinstance(given, list) or any(entry not in allowed for entry in given):
        of = ", ".join(map(str, allowed))
        raise ValueError(f"{name} must be a list of {of}, got {shown(given)}")
    if len(given) < count:
        raise ValueError(f"{name} has {len(given)} entries for {count} layers")
    return given[:count]


def _kinds(hf: Keys) -> list[str]:
    """The kind of each layer. Published lists have those of MTP layers, too."""
    count = hf["num_hidden_layers"]
    if hf["layer_types"] is not None:
        return _list_of(hf, "layer_types", (WINDOW, SPARSE, ALL), count)
    if hf["compress_ratios"] is not None:
        ratios = _list_of(hf, "compress_ratios", tuple(_RATIOS), count)
        return [_RATIOS[ratio] for ratio in ratios]
    return [ALL if index < 2 or index % 2 == 0 else SPARSE for index in range(count)]


def _by_id(hf: Keys) -> list[bool]:
    """Whether each layer's experts are those of a token's id."""
    count, first = hf["num_hidden_layers"], hf["num_hash_layers"]
    if hf["mlp_layer_types"] is not None:
        kinds = _list_of(hf, "mlp_layer_types", (_BY_ID, _CHOSEN), count)
        return [kind == _BY_ID for kind in kinds]
    if not is_integer(first) or first < 0:
        raise ValueError(f"num_hash_layers must be an integer from 0 on, got {shown(first)}")
    return [index < first for index in range(count)]


def _rates(hf: Keys) -> dict[str, int]:
    """Tokens of a span, by the kind of a layer. Raises ValueError for what is none."""
    given = hf["compress_rates"]
    given = {SPARSE: 4, ALL: 128} if given is None else given
    if not isinstance(given, dict) or given.keys() != {SPARSE, ALL}:
        raise ValueError(f"compress_rates must have {SPARSE} and {ALL}, got {shown(given)}")
    older = {SPARSE: hf["compress_rate_csa"], ALL: hf["compress_rate_hca"]}
    rates = {**given, **{kind: rate for kind, rate in older.items() if rate is not None}}
    for kind, rate in rates.items():
        if not is_positive_integer(rate):
            raise ValueError(f"compress_rates: {kind} must be a positive integer: {shown(rate)}")
    return rates


def _rotated_dim(hf: Keys) -> int:
    """Entries of a head that are rotated. Raises ValueError for what is no such number."""
    width, share, rotated = hf["head_dim"], hf[PARTIAL], hf["qk_rope_head_dim"]
    if share is None:
        share = 64 / 512 if rotated is None else rotated / width
    if not is_positive_number(share) or share > 1:
        raise ValueError(f"{PARTIAL} must be above 0, at most 1, got {shown(share)}")
    check_agrees(hf, "qk_rope_head_dim", int(width * share), f"{PARTIAL} of head_dim")
    return int(width * share)


def _ropes(hf: Keys) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers with a window alone, and of those with entries: parameters for each, or
    those of the latter alone."""
    given = hf["rope_scaling"] or hf["rope_parameters"] or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope parameters must be an object, got {shown(given)}")
    main, of_entries = given.get("main"), given.get("compress")
    if not isinstance(main, dict) or not isinstance(of_entries, dict):
        rest = {key: value for key, value in given.items() if key not in ("main", "compress")}
        main, of_entries = {}, rest | {"rope_theta": hf["compress_rope_theta"]}
    plain = {key: value for key, value in hf.items() if key != PARTIAL}
    plain["head_dim"] = _rotated_dim(hf)

    def rope(parameters: Keys) -> RopeConfig:
        check_agrees({PARTIAL: None, **parameters}, PARTIAL, hf[PARTIAL], "that beside them")
        inside = {key: value for key, value in parameters.items() if key != PARTIAL}
        if inside.get("rope_type", inside.get("type")) == "yarn":  # multiplies nothing
            inside = {"attention_factor": 1.0, **inside}
        return rope_from(plain, inside, hf["rope_theta"])

    return rope(main), rope(of_entries)


def _experts(hf: Keys, *, by_id: bool) -> ExpertsConfig:
    routing = RoutingConfig(
        hf["n_routed_experts"],
        hf["num_experts_per_tok"],
        "sqrt_softplus",
        normalize=True,
        scale=float(hf["routed_scaling_factor"]),
        correction=not by_id,
        token_ids=hf["vocab_size"] if by_id else None,
    )
    width, activation = hf["moe_intermediate_size"], BoundedSwiglu(float(hf["swiglu_limit"]))
    return ExpertsConfig(width, routing, width, activation=activation, shared_activation=activation)


def _spans(hf: Keys) -> dict[str, SpansConfig | None]:
    """What entries of layers of each kind stand for."""
    rates = _rates(hf)
    indexer = EntryIndexerConfig(hf["index_topk"], hf["index_n_heads"], hf["index_head_dim"])
    sparse = SpansConfig(rates[SPARSE], overlapping=True, indexer=indexer)
    return {WINDOW: None, SPARSE: sparse, ALL: SpansConfig(rates[ALL])}


def _check_mtp(hf: Keys) -> None:
    """Raise ValueError unless MTP layers have a window alone, where a list has them, too."""
    others = (hf["compress_ratios"] or [])[hf["num_hidden_layers"] :]
    if any(ratio != 0 for ratio in others):
        raise ValueError(
            f"compress_ratios: {shown(others)} of MTP layers is not supported, only 0: they have a "
            "window alone"
        )


def _read(hf: Keys) -> ModelConfig:
    for name in sorted(_SIZES):
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    for name in ("hc_eps", "compress_rope_theta"):
        if not is_positive_number(hf[name]):
            raise ValueError(f"{name} must be a number above 0, got {shown(hf[name])}")
    (plain, of_entries), spans = _ropes(hf), _spans(hf)
    streams = StreamsConfig(hf["hc_mult"], hf["hc_sinkhorn_iters"], float(hf["hc_eps"]), True)

    def attention(kind: str) -> EntryAttentionConfig:
        return EntryAttentionConfig(
            num_heads=hf["num_attention_heads"],
            head_dim=hf["head_dim"],
            rope=plain if kind == WINDOW else of_entries,
            query_latent=hf["q_lora_rank"],
            window=hf["sliding_window"],
            groups=hf["o_groups"],
            group_rank=hf["o_lora_rank"],
            spans=spans[kind],
        )

    layers = [
        LayerConfig(attention(kind), _experts(hf, by_id=by_id), streams=streams)
        for kind, by_id in zip(_kinds(hf), _by_id(hf), strict=True)
    ]
    model, mtp = model_of(hf, layers), mtp_of(hf, "deepseek_v4", BEFORE)
    if mtp is None:
        return model
    _check_mtp(hf)
    drafting = LayerConfig(attention(WINDOW), _experts(hf, by_id=False), streams=streams)
    mtp = dataclasses.replace(mtp, layers=(drafting,) * mtp.num_layers)
    return dataclasses.replace(model, mtp=mtp)


DEEPSEEK_V4 = Family(
    "DeepseekV4ForCausalLM",
    _read,
    defaults=sizes(129280, 4096, 2048, 43, 64, 1, 1048576)
    | {"head_dim": 512, "q_lora_rank": 1024, "sliding_window": 128, "eos_token_id": 1}
    | {"o_groups": 8, "o_lora_rank": 1024, "qk_rope_head_dim": None, PARTIAL: None}
    | {"compress_rope_theta": 160000.0, "layer_types": None, "compress_ratios": None}
    | {"compress_rates": None, "compress_rate_csa": None, "compress_rate_hca": None}
    | {"index_topk": 512, "index_n_heads": 64, "index_head_dim": 128}
    | {"n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048}
    | {"routed_scaling_factor": 1.5, "swiglu_limit": 10.0}
    | {"num_hash_layers": 3, "mlp_layer_types": None}
    | {"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "num_nextn_predict_layers": 1},
    fixed={
        "expert_dtype": (None, "fp8", "fp4"),  # weights are read as they are stored
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        "norm_topk_prob": (True,),
        "scoring_func": (None, "sqrtsoftplus"),
        "topk_method": (None, "noaux_tc"),
    },
    renames=(
        (r"^(?:model\.)?embed\.", "model.embed_tokens."),
        (r"^(?:model\.)?head\.", "lm_head."),
        (r"^(norm|layers)\.", r"model.\1."),
        (r"^(?:model\.)?hc_head(?:_|\.hc_)", "model.hc_head_"),
        (r"^(?:model\.)?mtp\.", "mtp."),
        (r"^(mtp\.\d+)\.shared_head\.norm\.", r"\1.norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
        (r"(\.self_attn(?:\.compressor)?(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.w(q_a|q_b|kv|gate|o_a|o_b)\.", r".\1_proj."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    ),
)
