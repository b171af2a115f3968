"""Whole config.json files as their publishers ship them, one file a model in configs/.

The keys and values were typed from copies in public repositories and from memory, as no model can
be downloaded here: a file shows the keys that a family is published with, and is no exact copy.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import (
    AttentionConfig,
    BlockSparseConfig,
    IndexedAttentionConfig,
    LatentConfig,
    SharedAttentionConfig,
)
from jaxspec.config.mlps import experts_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.recurrent import RecurrentConfig
from jaxspec.config.rope import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
)
from jaxspec.models.families import FAMILIES
from jaxspec.models.families.family import Family
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.declared import declared_keys
from jaxspec.models.json.keys import AROUND_KEYS, is_bookkeeping, words

CONFIGS = {path.stem: path for path in (Path(__file__).parent / "configs").glob("*.json")}
KINDS = {
    type(None): "default",
    LinearRopeScaling: "linear",
    Llama3RopeScaling: "llama3",
    LongRopeScaling: "longrope",
    ProportionalRopeScaling: "proportional",
    YarnRopeScaling: "yarn",
}
# Keys whose value changes nothing in the published config that has them, though it may elsewhere.
UNUSED = words(
    """aux_loss_alpha cache_implementation embd_pdrop ep_size resid_pdrop seq_aux
    mrope_interleaved mrope_section
    _sliding_window_pattern full_attention_interval no_rope_layer_interval
    max_window_layers sliding_window use_sliding_window
    intermediate_size long_factor original_max_position_embeddings auto_map
    residual_dropout moe_capacity enable_moe_fp32_combine"""
)
_OF_TRAINING = words(
    "block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init"
)
_OF_E_MODELS = words("vocab_size_per_layer_input use_double_wide_mlp")
# The same of single files.
UNUSED_IN = {
    "apertus-8b-instruct": words("hidden_dropout type"),
    "gemma-4-12b-it": _OF_E_MODELS,
    "gemma-4-26b-a4b-it": _OF_E_MODELS,
    "gemma-4-31b-it": _OF_E_MODELS,
    # transformers puts another head_dim in place of this one.
    "glm-5-saved-by-transformers": words("first_k_dense_replace head_dim"),
    "glm-5.2-fp8": words("first_k_dense_replace head_dim index_share_for_mtp_iteration"),
    "glm-5.3-flash": words(  # nothing is rotated, and lists say what the others do
        """first_k_dense_replace full_attn_layers kda_layers index_share_for_mtp_iteration
        indexer_rope_interleave"""
    ),
    "hy4-preview-saved-by-transformers": words("head_dim learnable_sink_init"),
    "hy4-saved-by-transformers": words("head_dim learnable_sink_init"),
    # Rotated entries are told by qk_rope_head_dim, too.
    "ling-3.0-flash": words("embedding_dropout linear_silu mtp_loss_scaling_factor output_dropout")
    | words("partial_rotary_factor rotary_dim router_dtype use_qk_norm"),
    "granite-4.0-micro": words(
        """mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand
        mamba_n_groups mamba_n_heads mamba_proj_bias init_method num_experts_per_tok"""
    ),
    "bamba-9b": words("mamba_chunk_size num_logits_to_keep use_mamba_kernels"),
    "nemotron-3-nano-30b-a3b": words(
        """chunk_size expand hidden_dropout mamba_ssm_cache_dtype num_logits_to_keep rope_theta
        rescale_prenorm_residual time_step_floor time_step_max time_step_min use_mamba_kernels"""
    ),
    "kimi-linear-48b-a3b-instruct": words("head_dim rope_theta"),
    # Without a norm it is before or after nothing, and mamba_d_ssm says the width.
    "falcon-h1-0.5b-instruct": words(
        "mamba_chunk_size num_logits_to_keep mamba_norm_before_gate mamba_expand"
    ),
    "granite-4.0-h-tiny": words("mamba_chunk_size init_method"),
    "granite-4.0-h-350m": words("mamba_chunk_size init_method num_experts_per_tok"),
    "lfm2-1.2b": _OF_TRAINING,
    "lfm2-350m-saved-by-transformers": _OF_TRAINING,
    "hunyuan-7b-instruct": words(  # those of its rope beside alpha have no effect
        """attention_head_dim org_vocab_size cla_share_factor factor beta_fast beta_slow mscale
        mscale_all_dim"""
    ),
    "llama-4-scout-17b-16e-instruct": words("intermediate_size_mlp"),  # no layer is dense
    # The kinds of the layers are given.
    "exaone-4.5-33b-saved-by-transformers": words("sliding_window_pattern"),
    "k-exaone-236b-a23b": words("first_last_k_dense_replace"),
    "youtu-llm-2b-saved-by-transformers": words("embedding_initializer_range"),
    "minimax-m2": words("use_mtp num_mtp_modules mtp_transformer_layers"),  # not published
    "ministral-3-8b-instruct": words("type"),  # beside rope_type
    # The latter inside the rope parameters: transformers does not read it there.
    "mistral-small-4-saved-by-transformers": words("type max_position_embeddings"),
}


class Facts(NamedTuple):
    """Of a model. ``rope``: of the layers without windows; ``windows``: how many have one."""

    layers: int
    vocabulary: int
    positions: int
    heads: int
    kv_heads: int  # 1: latent attention keeps one vector for all heads
    head_dim: int
    rope: str
    experts: tuple[int, int] = (0, 0)  # of a layer, and how many a token chooses
    windows: int = 0
    recurrent: int = 0


EXPECTED = {
    "deepseek-r1": Facts(61, 129280, 163840, 128, 1, 192, "yarn", (256, 8)),
    "deepseek-r1-saved-by-transformers": Facts(61, 129280, 163840, 128, 1, 192, "yarn", (256, 8)),
    "deepseek-v3": Facts(61, 129280, 163840, 128, 1, 192, "yarn", (256, 8)),
    "gemma-2-27b-it": Facts(46, 256000, 8192, 32, 16, 128, "default", windows=23),
    "gemma-2-9b": Facts(42, 256000, 8192, 16, 8, 256, "default", windows=21),
    "gemma-3-1b-it": Facts(26, 262144, 32768, 4, 1, 256, "default", windows=22),
    "gemma-3-270m-it": Facts(18, 262144, 32768, 4, 1, 256, "default", windows=15),
    "gemma-3-27b-it": Facts(62, 262208, 131072, 32, 16, 128, "linear", windows=52),
    "gemma-3-4b-it": Facts(34, 262208, 131072, 8, 4, 256, "linear", windows=29),
    "gemma-4-12b-it": Facts(48, 262144, 262144, 16, 1, 512, "proportional", windows=40),
    "gemma-4-26b-a4b-it": Facts(
        30, 262144, 262144, 16, 2, 512, "proportional", (128, 8), windows=25
    ),
    "gemma-4-e2b-it": Facts(35, 262144, 131072, 8, 1, 512, "proportional", windows=28),
    "gemma-4-e4b-it": Facts(42, 262144, 131072, 8, 2, 512, "proportional", windows=35),
    "gemma-4-31b-it": Facts(60, 262144, 262144, 32, 4, 512, "proportional", windows=50),
    "gemma-7b": Facts(28, 256000, 8192, 16, 16, 256, "default"),
    "glm-4.5": Facts(92, 151552, 131072, 96, 8, 128, "default", (160, 8)),
    "glm-4.5-air": Facts(46, 151552, 131072, 96, 8, 128, "default", (128, 8)),
    "gpt-oss-20b": Facts(24, 201088, 131072, 64, 8, 64, "yarn", (32, 4), windows=12),
    "granite-3.3-8b-instruct": Facts(40, 49159, 131072, 32, 8, 128, "default"),
    "llama-3.2-1b-instruct": Facts(16, 128256, 131072, 32, 8, 64, "llama3"),
    "llama-4-scout-17b-16e-instruct": Facts(48, 202048, 10485760, 40, 8, 128, "llama3", (16, 1)),
    "mimo-7b-base": Facts(36, 151680, 32768, 32, 8, 128, "default"),
    "mistral-7b-instruct-v0.3": Facts(32, 32768, 32768, 32, 8, 128, "default"),
    "mixtral-8x7b-instruct-v0.1": Facts(32, 32000, 32768, 32, 8, 128, "default", (8, 2)),
    "olmo-2-1124-7b": Facts(32, 100352, 4096, 32, 32, 128, "default"),
    "olmo-3-1025-7b": Facts(32, 100278, 65536, 32, 32, 128, "yarn", windows=24),
    "phi-3-mini-4k-instruct": Facts(32, 32064, 4096, 32, 32, 96, "default", windows=32),
    "phi-4": Facts(40, 100352, 16384, 40, 10, 128, "default"),
    "phi-4-mini-instruct": Facts(32, 200064, 4096, 24, 8, 128, "longrope", windows=32),
    "qwen2.5-0.5b-instruct": Facts(24, 151936, 32768, 14, 2, 64, "default"),
    "qwen3-30b-a3b": Facts(48, 151936, 40960, 32, 4, 128, "default", (128, 8)),
    "qwen3-8b": Facts(36, 151936, 40960, 32, 8, 128, "default"),
    "qwen3-next-80b-a3b-instruct": Facts(
        48, 151936, 262144, 16, 2, 256, "default", (512, 10), recurrent=36
    ),
    "qwen3.5-27b": Facts(64, 248320, 262144, 24, 4, 256, "default", recurrent=48),
    "qwen3.5-35b-a3b": Facts(40, 248320, 262144, 16, 2, 256, "default", (256, 8), recurrent=30),
    "qwen3.8-flash-next": Facts(48, 248320, 262144, 24, 2, 256, "default", (512, 10), recurrent=36),
    "qwen3.6-27b": Facts(64, 248320, 262144, 24, 4, 256, "default", recurrent=48),
    "apertus-8b-instruct": Facts(32, 131072, 65536, 32, 8, 128, "llama3"),
    "command-r7b-12-2024": Facts(32, 256000, 8192, 32, 8, 128, "default", windows=24),
    "deepseek-v3.2": Facts(61, 129280, 163840, 128, 1, 192, "yarn", (256, 8)),
    "deepseek-v4-flash": Facts(43, 129280, 1048576, 64, 1, 512, "default", (256, 6), windows=43),
    "dots.llm1.inst": Facts(62, 152064, 32768, 32, 32, 128, "default", (128, 6)),
    "ernie-4.5-0.3b-pt": Facts(18, 103424, 131072, 16, 2, 128, "default"),
    "ernie-4.5-21b-a3b-pt": Facts(28, 103424, 131072, 20, 4, 128, "default", (64, 6)),
    "exaone-4.0-32b": Facts(64, 102400, 131072, 40, 8, 128, "default", windows=48),
    "glm-4.7-flash": Facts(47, 154880, 202752, 20, 1, 256, "default", (64, 4)),
    "glm-5.2-fp8": Facts(78, 154880, 1048576, 64, 1, 256, "default", (256, 8)),
    "glm-5-saved-by-transformers": Facts(78, 154880, 202752, 64, 1, 256, "default", (256, 8)),
    "glm-5.3-flash": Facts(45, 154880, 1048576, 64, 1, 256, "default", (288, 8), recurrent=34),
    "bamba-9b": Facts(32, 128256, 262144, 32, 8, 128, "default", recurrent=29),
    "falcon-h1-0.5b-instruct": Facts(36, 32784, 16384, 8, 2, 64, "default", recurrent=36),
    "nemotron-3-nano-30b-a3b": Facts(
        52, 131072, 262144, 32, 2, 128, "default", (128, 6), recurrent=23
    ),
    "granite-4.0-h-tiny": Facts(40, 100352, 131072, 12, 4, 128, "default", (64, 6), recurrent=36),
    "granite-4.0-h-350m": Facts(32, 100352, 32768, 12, 4, 64, "default", recurrent=28),
    "granite-4.0-micro": Facts(40, 100352, 131072, 40, 8, 64, "default"),
    "hy3-saved-by-transformers": Facts(80, 120832, 131072, 64, 8, 128, "default", (192, 8)),
    "hy4-preview-saved-by-transformers": Facts(34, 120832, 262144, 32, 1, 256, "default", (256, 8)),
    "hy4-saved-by-transformers": Facts(78, 120832, 262144, 64, 1, 256, "default", (256, 8)),
    "hunyuan-7b-instruct": Facts(32, 128167, 262144, 32, 8, 128, "default"),
    "kimi-k2-instruct": Facts(61, 163840, 131072, 64, 1, 192, "yarn", (384, 8)),
    "kimi-k2.5": Facts(61, 163840, 262144, 64, 1, 192, "yarn", (384, 8)),
    "kimi-linear-48b-a3b-instruct": Facts(
        27, 163840, 1048576, 32, 1, 192, "default", (256, 8), recurrent=20
    ),
    "ling-3.0-flash": Facts(42, 157184, 262144, 32, 1, 192, "default", (512, 8), recurrent=35),
    "lfm2-1.2b": Facts(16, 65536, 128000, 32, 8, 64, "default", recurrent=10),
    "lfm2-8b-a1b": Facts(24, 65536, 128000, 32, 8, 64, "default", (32, 4), recurrent=18),
    "lfm2-350m-saved-by-transformers": Facts(16, 65536, 128000, 16, 8, 64, "default", recurrent=10),
    "minimax-m2": Facts(62, 200064, 196608, 48, 8, 128, "default", (256, 8)),
    "minimax-m3": Facts(60, 200064, 524288, 64, 4, 128, "default", (128, 4)),
    "minimax-m3-saved-by-transformers": Facts(60, 200064, 524288, 64, 4, 128, "default", (128, 4)),
    "ministral-3-8b-instruct": Facts(34, 131072, 262144, 32, 8, 128, "yarn"),
    "mistral-small-3.1-24b-instruct": Facts(40, 131072, 131072, 32, 8, 128, "default"),
    "mistral-small-4-saved-by-transformers": Facts(
        36, 131072, 1048576, 32, 1, 128, "yarn", (128, 4)
    ),
    "qwen1.5-moe-a2.7b": Facts(24, 151936, 8192, 16, 16, 128, "default", (60, 4)),
    "qwen2-vl-7b-instruct": Facts(28, 152064, 32768, 28, 4, 128, "default"),
    "qwen2.5-vl-7b-instruct": Facts(28, 152064, 128000, 28, 4, 128, "default"),
    "qwen3-vl-2b-instruct": Facts(28, 151936, 262144, 16, 8, 128, "default"),
    "qwen3-vl-30b-a3b-instruct": Facts(48, 151936, 262144, 32, 4, 128, "default", (128, 8)),
    "seed-oss-36b-instruct": Facts(64, 155136, 524288, 80, 8, 128, "default"),
    "step-3.5-flash": Facts(45, 128896, 262144, 64, 8, 128, "llama3", (288, 8), windows=33),
    "step-3.7-flash": Facts(45, 128896, 262144, 64, 8, 128, "llama3", (288, 8), windows=33),
    "a.x-k1": Facts(61, 163840, 131072, 64, 1, 192, "default", (192, 8)),
    "a.x-k1-saved-by-transformers": Facts(61, 163840, 32768, 64, 1, 192, "default", (192, 8)),
    "afm-4.5b-saved-by-transformers": Facts(36, 128005, 65536, 20, 4, 128, "default"),
    "exaone-4.5-33b-saved-by-transformers": Facts(
        64, 153600, 262144, 40, 8, 128, "default", windows=48
    ),
    "glm-4.5v-saved-by-transformers": Facts(46, 151424, 65536, 96, 8, 128, "default", (128, 8)),
    "granite-3.0-3b-a800m-saved-by-transformers": Facts(
        32, 49155, 4096, 24, 8, 64, "default", (40, 8)
    ),
    "k-exaone-236b-a23b": Facts(48, 153600, 262144, 64, 8, 128, "default", (128, 8), windows=36),
    "mellum2-12b-a2.5b-saved-by-transformers": Facts(
        28, 98304, 131072, 32, 4, 128, "default", (64, 8), windows=21
    ),
    "ministral-8b-instruct-2410-saved-by-transformers": Facts(
        36, 131072, 32768, 32, 8, 128, "default", windows=27
    ),
    "olmoe-1b-7b-0924-saved-by-transformers": Facts(
        16, 50304, 4096, 16, 16, 128, "default", (64, 8)
    ),
    "solar-open-100b-saved-by-transformers": Facts(
        48, 196608, 131072, 64, 8, 128, "default", (128, 8)
    ),
    "youtu-llm-2b-saved-by-transformers": Facts(32, 128256, 131072, 16, 1, 192, "default"),
    "smollm3-3b": Facts(36, 128256, 65536, 16, 4, 128, "default"),
}


def published(name: str) -> dict[str, Any]:
    return json.loads(CONFIGS[name].read_text())


def facts(config: ModelConfig) -> Facts:
    recurrent = sum(layer.is_recurrent for layer in config.layers)
    every = [mixer for layer in config.layers for mixer in layer.mixers]
    mixers = [mixer for mixer in every if not isinstance(mixer, RecurrentConfig)]
    inside = SharedAttentionConfig, IndexedAttentionConfig, BlockSparseConfig
    mixers = [one.attention if isinstance(one, inside) else one for one in mixers]
    windows = [None if isinstance(one, LatentConfig) else one.window for one in mixers]
    full = mixers[windows.index(None) if None in windows else 0]
    rope = full.ropes[0] if full.ropes else None
    mlps = [layer.mlp for layer in config.layers if layer.mlp is not None]
    experts = experts_of(mlps[-1])
    routing = experts and experts.routing
    return Facts(
        layers=config.num_layers,
        vocabulary=config.vocab_size,
        positions=config.max_position,
        heads=full.num_heads,
        kv_heads=full.num_kv_heads if isinstance(full, AttentionConfig) else 1,
        head_dim=full.query_dim if isinstance(full, LatentConfig) else full.head_dim,
        rope=KINDS[type(rope and rope.scaling)],
        experts=(routing.num_experts, routing.top_k) if routing else (0, 0),
        windows=sum(window is not None for window in windows),
        recurrent=recurrent,
    )


def test_every_file_has_its_facts_and_every_family_a_file():
    assert CONFIGS.keys() == EXPECTED.keys()
    raws = [published(name) for name in CONFIGS]
    of_text = {raw.get("text_config", raw).get("model_type") for raw in raws}
    kinds = {raw["model_type"] for raw in raws} | of_text
    assert kinds >= FAMILIES.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_whole_config_is_read(name: str):
    assert facts(parse_model_config(published(name))) == EXPECTED[name]


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "gemma-3-27b-it"])
def test_stop_tokens_beside_a_text_config_are_those_of_the_model(name: str):
    assert parse_model_config(published(name)).stop_token_ids == (1, 106)


def places(raw: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of the whole config, of its text model's, and of objects of rope parameters."""
    yield path
    for key in ("text_config", "rope_scaling", "rope_parameters"):
        if isinstance(raw.get(key), dict):
            yield from places(raw[key], (*path, key))


def changed(raw: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**raw, first: changed(raw.get(first, {}), tuple(rest), value) if rest else value}


def inside(raw: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    for key in path:
        raw = raw[key]
    return raw


def read_as(raw: Mapping[str, Any]) -> str:
    """The model_type of the class that transformers reads a file with."""
    family = FAMILIES[raw["model_type"]]
    return (family.class_of if isinstance(family, Family) else None) or raw["model_type"]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_unknown_field_is_named_wherever_it_stands(name: str):
    raw = published(name)
    for path in places(raw):
        other = changed(raw, (*path, "a_new_field"), 1)
        of_rope = path[-1:] in (("rope_scaling",), ("rope_parameters",))
        if of_rope or declared_keys(read_as(raw)) is None:
            with pytest.raises(ValueError, match="unknown key 'a_new_field'") as caught:
                parse_model_config(other)
            assert "\n" not in str(caught.value)
        else:
            with pytest.warns(UserWarning, match="does not read: a_new_field$"):
                assert parse_model_config(other) == parse_model_config(raw)


def other_values(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [2 * value, value + 1]
        case list():
            return [value[::-1], value[:1], [*value, 7]]
        case dict():
            return [value | {"a_new_field": 1}]
        case None:
            return [3, True, "x"]
    return [f"{value}x"]


def has_effect(raw: Mapping[str, Any], whole: ModelConfig, path: tuple[str, ...]) -> bool:
    """Whether another value is refused or warned of, or gives another model."""
    value = inside(raw, path[:-1])[path[-1]]
    try:
        models = [parse_model_config(changed(raw, path, one)) for one in other_values(value)]
    except (ValueError, UserWarning):
        return True
    return any(model != whole for model in models)


@pytest.mark.parametrize("name", EXPECTED)
def test_no_field_is_passed_over(name: str):
    """Another value changes the model or is refused, but for fields known to have no effect."""
    raw = published(name)
    whole = parse_model_config(raw)
    beside = AROUND_KEYS if "vision_config" in raw else frozenset()
    silent = {
        path[-1]
        for place in places(raw)
        for path in ((*place, key) for key in inside(raw, place))
        if not is_bookkeeping(path[-1]) and not has_effect(raw, whole, path)
    }
    assert silent <= UNUSED | beside | UNUSED_IN.get(name, frozenset())


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("deepseek-v3", "qk_head_dim", 128,
         "qk_head_dim = 128 contradicts qk_nope_head_dim + qk_rope_head_dim (= 192); correct one"),
        ("deepseek-v3", "head_dim", 128, "head_dim = 128 contradicts qk_rope_head_dim (= 64)"),
        ("deepseek-v3", "num_key_value_heads", 8, "contradicts num_attention_heads (= 128)"),
        ("deepseek-v3", "auto_map", {"AutoModelForCausalLM": "mine.Other"},
         "auto_map: AutoModelForCausalLM = 'mine.Other' is not supported, only a class Deepseek"),
        ("deepseek-v3", "auto_map", "x", "auto_map must be an object, got 'x'"),
        ("deepseek-v3", "scoring_func", "softmax", "scoring_func = 'softmax' is not supported"),
        ("deepseek-v3", "topk_method", "greedy", "topk_method = 'greedy' is not supported"),
        ("deepseek-v3", "moe_layer_freq", 2, "moe_layer_freq = 2 is not supported, only 1"),
        ("gemma-2-9b", "sliding_window_size", 8,
         "sliding_window_size = 8 contradicts sliding_window (= 4096)"),
        ("gemma-3-1b-it", "_sliding_window_pattern", 2,
         "_sliding_window_pattern = 2 contradicts sliding_window_pattern (= 6)"),
        ("gemma-3-4b-it", "text_config.attn_logit_softcapping", 5.0, "attn_logit_softcapping = 5"),
        ("gemma-3-4b-it", "text_config.model_type", "gemma3n_text", "model_type 'gemma3n_text'"),
        ("gemma-3-4b-it", "text_config.use_bidirectional_attention", True, "use_bidirectional_att"),
        ("gemma-7b", "hidden_act", "relu", "hidden_act = 'relu' is not supported"),
        ("glm-4.5", "rope_interleaved", True, "rope_interleaved = True is not supported"),
        ("gpt-oss-20b", "initial_context_length", 8192,
         "initial_context_length = 8192 contradicts original_max_position_embeddings (= 4096)"),
        ("gpt-oss-20b", "experts_per_token", 2, "num_experts_per_tok and experts_per_token must"),
        ("granite-3.3-8b-instruct", "logits_scaling", 0, "logits_scaling must be a number above 0"),
        ("llama-3.2-1b-instruct", "rope_scaling.rope_type", "ntk", "rope_type 'ntk' is not"),
        ("mimo-7b-base", "use_mrope", True, "use_mrope = True is not supported"),
        ("mimo-7b-base", "attention_bias", False, "attention_bias = False is not supported"),
        ("mistral-7b-instruct-v0.3", "sliding_window", 0, "sliding_window must be a positive"),
        ("mixtral-8x7b-instruct-v0.1", "num_experts_per_tok", 9, "9 experts cannot be chosen"),
        ("olmo-3-1025-7b", "layer_types", ["full_attention"], "layer_types has 1 entries for 32"),
        ("phi-4-mini-instruct", "full_attn_mod", 2, "full_attn_mod = 2 is not supported, only 1"),
        ("phi-4-mini-instruct", "partial_rotary_factor", 0.5, "longrope has 48 factors for 32"),
        ("phi-4-mini-instruct", "partial_rotary_factor", 0.9,
         "partial_rotary_factor 0.9 of a head_dim of 128 is 115: it must be an even number"),
        ("phi-4-mini-instruct", "rope_scaling.rope_theta", 2.0,
         "rope_theta = 10000.0 contradicts that of rope_scaling (= 2.0)"),
        ("qwen2.5-0.5b-instruct", "use_sliding_window", 1, "use_sliding_window must be true or f"),
        ("qwen3-30b-a3b", "mlp_only_layers", "0", "mlp_only_layers must be a list of integers"),
        ("qwen3-30b-a3b", "mlp_only_layers", [48], "mlp_only_layers has [48], and the model 48"),
        ("qwen3-30b-a3b", "decoder_sparse_step", 0, "decoder_sparse_step must be a positive"),
        ("qwen3-8b", "head_dim", 127, "needs an even head_dim, not 127"),
        ("qwen3-next-80b-a3b-instruct", "linear_num_value_heads", 24,
         "linear_num_value_heads (24) must be a multiple of linear_num_key_heads (16)"),
        ("qwen3.5-27b", "text_config.mlp_only_layers", [0], "mlp_only_layers = [0] is not"),
        ("qwen3.5-27b", "text_config.partial_rotary_factor", 0.5,
         "partial_rotary_factor = 0.5 contradicts that of rope_parameters (= 0.25)"),
        ("qwen3.5-35b-a3b", "text_config.decoder_sparse_step", 2, "decoder_sparse_step = 2 is not"),
        ("qwen3.5-35b-a3b", "text_config.norm_topk_prob", False, "norm_topk_prob = False is not"),
        ("smollm3-3b", "layer_types", ["sliding_attention"] * 36, "no sliding_window is in use"),
        # Weights of experts that may or may not be normalized.
        ("deepseek-v3", "norm_topk_prob", None, "norm_topk_prob must be true or false, got None"),
        ("glm-4.5", "norm_topk_prob", None, "norm_topk_prob must be true or false, got None"),
        ("qwen3-30b-a3b", "norm_topk_prob", None, "norm_topk_prob must be true or false, got None"),
        ("qwen3-next-80b-a3b-instruct", "norm_topk_prob", None, "norm_topk_prob must be true or"),
    ],
)  # fmt: skip
def test_a_changed_field_is_refused_by_name(name: str, path: str, value: Any, message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(changed(published(name), tuple(path.split(".")), value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_without_experts_are_read():
    raw = published("qwen3-30b-a3b") | {"mlp_only_layers": [3], "decoder_sparse_step": 2}
    has_experts = [isinstance(layer.mlp, ExpertsConfig) for layer in parse_model_config(raw).layers]
    assert has_experts[:6] == [False, True, False, False, False, True]
