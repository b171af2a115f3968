"""Hy4, and the text model of that with images: several residual streams that are not mixed, latent
attention with sinks and gates to what an indexer chooses, experts whose activation has limits."""

import dataclasses

from jaxspec.config.experts import BoundedSwiglu
from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.models.families.family import Family, Keys, check_agrees, dense_of, model_of, sizes
from jaxspec.models.families.indexed import KINDS, shared_layers
from jaxspec.models.families.rope import without_image_positions
from jaxspec.models.families.routed import DEEPSEEK_V3, by_kind, latent_of, sigmoid_experts
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, is_positive_number, shown

_SIZES = words("index_topk index_n_heads index_head_dim hc_mult q_lora_rank")


def _check(hf: Keys) -> None:
    for name in sorted(_SIZES):
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    for name in ("hc_eps", "hc_magnitude"):
        if not is_positive_number(hf[name]):
            raise ValueError(f"{name} must be a number above 0, got {shown(hf[name])}")
    kinds, count = hf["layer_types"], hf["num_hidden_layers"]
    if kinds is not None and all(kinds != [kind] * count for kind in KINDS):
        raise ValueError(
            f"layer_types = {shown(kinds)} is not supported, only {KINDS[0]!r} in every layer"
        )
    if hf["num_experts"] is not None:
        check_agrees(hf, "num_experts", hf["n_routed_experts"], "n_routed_experts")


def _shared(hf: Keys) -> list[bool]:
    """Whether the indexer of an earlier layer counts, for each layer; else every fourth layer has
    one, from the second on, and the first."""
    count = hf["num_hidden_layers"]
    kinds = ["full" if index == 0 or index % 4 == 1 else "shared" for index in range(count)]
    told = kinds if hf["indexer_types"] is None else hf["indexer_types"]
    return shared_layers({**hf, "indexer_types": told})


def _attention(hf: Keys) -> LatentConfig:
    indexer = IndexerConfig(
        hf["index_topk"],
        hf["index_n_heads"],
        hf["index_head_dim"],
        interleaved=hf["rope_interleave"],
        rotates_last=True,
        norm_eps=hf["rms_norm_eps"],
    )
    latent = latent_of({**hf, "head_dim": None})
    return dataclasses.replace(latent, indexer=indexer, gate="entries", sinks=True)


def _read(hf: Keys) -> ModelConfig:
    _check(hf)
    attention, dense, has_experts = _attention(hf), dense_of(hf), by_kind(hf)
    activation = BoundedSwiglu(float(hf["swiglu_limit"]))
    experts = dataclasses.replace(sigmoid_experts(hf, 256), activation=activation, fused="stacked")
    streams = StreamsConfig(
        hf["hc_mult"], 1, float(hf["hc_eps"]), folded=True, magnitude=float(hf["hc_magnitude"])
    )
    assert attention.indexer is not None
    layers = []
    for index, shared in enumerate(_shared(hf)):
        indexer = dataclasses.replace(attention.indexer, shared=shared)
        mixer = dataclasses.replace(attention, indexer=indexer)
        mlp = experts if has_experts(index) else dense
        layers.append(LayerConfig(mixer, mlp, streams=streams))
    return dataclasses.replace(model_of(hf, layers), mtp=None)


HY_V4 = Family(
    "HYV4ForCausalLM",
    _read,
    keys=words("attention_bias learnable_sink_init"),  # the latter is of training
    defaults=dict(DEEPSEEK_V3.defaults)
    | sizes(120832, 2816, 6912, 34, 32, 32, 262144)
    | {"rms_norm_eps": 1e-5, "eos_token_id": 120025, "rope_interleave": False}
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 192}
    | {"qk_rope_head_dim": 64, "v_head_dim": 256, "num_nextn_predict_layers": 0}
    | {"n_routed_experts": 256, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    | {"routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "mlp_layer_types": None, "layer_types": None}
    | {"index_topk": 2048, "index_n_heads": 16, "index_head_dim": 128, "num_experts": None}
    | {"indexer_types": None, "index_topk_pattern": None, "index_topk_freq": None}
    | {"index_skip_topk_offset": 2, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6}
    | {"swiglu_limit": 10.0},
    fixed={**DEEPSEEK_V3.fixed, "rope_interleave": (None, False)},
    renames=(
        (r"\.hc_pre\.hc_", ".hc_"),
        (r"\.(?:learnable_sink_param|sinks)$", ".sinks"),
        (r"\.self_attn\.(?:linear_gate|gate_proj)\.", ".self_attn.g_proj."),
        (r"\.linear_gate\.", ".gate_proj."),
        (r"\.(?:hc_attn_layer\.hc_|attn_hc\.)", ".hc_attn_"),
        (r"\.(?:hc_mlp_layer\.hc_|ffn_hc\.)", ".hc_ffn_"),
        (r"\.hc_head\.(?:hc_head_|hc_)", ".hc_head_"),
    ),
    left_out=(r"^model\.mtp_layers\.",),
)


def _read_text_of_images(hf: Keys) -> ModelConfig:
    """Pairs of neighbours are rotated, and norms of latents have the model's epsilon."""

    def changed(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.mixer, LatentConfig)
        mixer = dataclasses.replace(layer.mixer, norm_eps=hf["rms_norm_eps"])
        return dataclasses.replace(layer, mixer=mixer)

    return _read(hf).map_layers(changed)


HY_V4_VL_TEXT = dataclasses.replace(
    HY_V4,
    architecture="HYV4VLForConditionalGeneration",
    read=_read_text_of_images,
    defaults=dict(HY_V4.defaults)
    | sizes(120832, 6144, 18432, 78, 64, 64, 262144)
    | {"q_lora_rank": 2048, "moe_intermediate_size": 2048, "index_n_heads": 32}
    | {"rope_interleave": True},
    fixed={**DEEPSEEK_V3.fixed, "rope_interleave": (None, True)},
    rewrite=without_image_positions,
)
HY_V4_VL = WithImages("HYV4VLForConditionalGeneration", {"hy_v4_vl_text": HY_V4_VL_TEXT})
