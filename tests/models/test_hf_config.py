"""config.json to ModelConfig and back: what is understood, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import ModelConfig, dense_model
from jaxspec.config.rope import Llama3RopeScaling, RopeConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.from_config.model import load_model_config, parse_model_config, to_hf_config
from jaxspec.models.json.declared import COMPUTED, declared_keys

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# As Meta published it, written by transformers 4.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LLAMA = SMALL | {"model_type": "llama", "rope_theta": 10000.0}
MISTRAL = SMALL | {"model_type": "mistral"}
QWEN2 = SMALL | {"model_type": "qwen2"}
QWEN3 = SMALL | {"model_type": "qwen3", "head_dim": 32}
GEMMA2 = SMALL | {"model_type": "gemma2", "head_dim": 32, "num_attention_heads": 2}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text"}
SMOLLM3 = SMALL | {"model_type": "smollm3"}
PHI3 = SMALL | {"model_type": "phi3", "original_max_position_embeddings": 64, "eos_token_id": 2}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def attention(config: ModelConfig) -> AttentionConfig:
    return config.layers[0].attention


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in config.layers)


def test_llama_31():
    assert parse_model_config(LLAMA_31_8B) == dense_model(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position=131072,
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
        stop_token_ids=(128001, 128008, 128009),
    )


def test_keys_of_transformers_5_mean_the_same():
    renamed = without(LLAMA_31_8B, "rope_theta", "rope_scaling", "torch_dtype") | {
        "dtype": "bfloat16",
        "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0},
    }
    assert parse_model_config(renamed) == parse_model_config(LLAMA_31_8B)


def test_old_name_of_the_rope_type():
    renamed = LLAMA_31_8B | {"rope_scaling": LLAMA3 | {"type": "llama3"}}
    assert parse_model_config(renamed) == parse_model_config(LLAMA_31_8B)


def test_qwen25_has_biases_on_qkv_alone_and_its_window_is_off():
    config = parse_model_config(QWEN25_7B)
    own = attention(config)
    assert (own.qkv_bias, own.o_bias, own.qk_norm) == (True, False, False)
    assert windows_of(config) == (None,) * 28
    assert (own.head_dim, own.rope.theta) == (128, 1e6)


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL | {"sliding_window": 8}, (8,) * 4),
        (MISTRAL, (4096,) * 4),  # Mistral-7B-v0.1's, transformers' default
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
         (None, None, None, 8)),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
                  "layer_types": ["sliding_attention", "full_attention"] * 2},
         (8, None, 8, None)),
    ],
)  # fmt: skip
def test_sliding_windows(raw: dict[str, Any], windows: tuple[int | None, ...]):
    assert windows_of(parse_model_config(raw)) == windows


@pytest.mark.parametrize(
    ("raw", "flags"),
    [
        (LLAMA, (False, False, False, False)),
        (LLAMA | {"attention_bias": True}, (True, True, False, False)),
        (LLAMA | {"mlp_bias": True}, (False, False, True, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms(raw: dict[str, Any], flags: tuple[bool, ...]):
    config = parse_model_config(raw)
    own, mlp = attention(config), config.layers[0].mlp
    assert isinstance(mlp, DenseConfig)
    assert (own.qkv_bias, own.o_bias, mlp.bias, own.qk_norm) == flags


def test_stop_tokens_of_both_files(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    assert load_model_config(tmp_path).stop_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert load_model_config(tmp_path).stop_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (LLAMA | {"model_type": "bloom"}, "'bloom' is not supported; supported are llama"),
        (without(LLAMA, "model_type"), "model_type None is not supported"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "of type 'linear' lack factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "truncate": 1}},
         "truncate must be true or false, got 1"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4,
                                   "long_factor": [1.0, "2"]}},
         "rope parameter long_factor must be a list of numbers"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4,
                                   "long_factor": [2.0] * 4}},
         "longrope has 4 factors for 8 frequencies"),
        (LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "high_freq_factor"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor = 0.5"),
        (LLAMA | {"sliding_window": 8}, "sliding_window = 8"),
        (LLAMA | {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (LLAMA | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
         "no sliding_window is in use"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        (LLAMA | {"vocab_size": 2**40}, "vocab_size must be a positive integer, got 1099511627776"),
        (LLAMA | {"num_hidden_layers": 10**6}, "num_hidden_layers 1000000 is more than 1000"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, got nan"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "factor": 0}},
         "rope parameter factor must be a number above 0, got 0"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 0.5}},
         "low_freq_factor (1.0) must not be above high_freq_factor (0.5)"),
        (LLAMA | {"rope_scaling": {"rope_type": ["llama3"]}}, "rope_type ['llama3'] is not supp"),
        (LLAMA | {"eos_token_id": 320}, "eos_token_id 320 is no id of a vocabulary of 320 tokens"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": "3"},
         "max_window_layers must be an integer, got '3'"),
        (QWEN2 | {"layer_types": 4}, "layer_types must be a list, got 4"),
        (MISTRAL | {"attention_bias": True}, "attention_bias = True"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supp"),
        (LLAMA | {"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number above 0, got '1e-5'"),
        (LLAMA | {"rope_theta": "1e4"}, "rope_theta must be a number above 0, got '1e4'"),
        (LLAMA | {"rope_theta": None}, "rope parameters of type 'default' lack rope_theta"),
        (LLAMA | {"rope_scaling": [1]}, "rope parameters must be an object, got [1]"),
        (LLAMA | {"eos_token_id": [1, "2"]}, "eos_token_id must be an integer or a list of them"),
        (LLAMA | {"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        (LLAMA | {"num_key_value_heads": 3},
         "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
    ],
)  # fmt: skip
def test_refused(raw: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(raw)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_transformers_does_not_read_are_named_in_one_warning():
    """Those of published fine-tunes, and those of another family, which the class does not have."""
    other = {"unk_token_id": 0, "_model_name_or_path": "x", "max_new_tokens_hint": 1, "clip_qkv": 8}
    with pytest.warns(UserWarning) as caught:
        assert parse_model_config(LLAMA | other) == parse_model_config(LLAMA)
    [warning] = caught
    expected = (
        "config.json has keys that a llama model does not read: max_new_tokens_hint, clip_qkv"
    )
    assert str(warning.message) == expected


def test_all_that_is_wrong_with_a_file_is_named_at_once():
    other = {"hidden_act": "relu", "attention_bias": True, "sliding_window": 8, "a": 1}
    with pytest.raises(ValueError) as caught:
        parse_model_config(QWEN2 | {"use_mrope": True} | other)
    assert str(caught.value).startswith("use_mrope = True is not supported, only False; hidden_act")
    more = {"hidden_size": "64", "rms_norm_eps": 0, "tie_word_embeddings": 1}
    with pytest.raises(ValueError) as caught:
        parse_model_config(QWEN2 | more | {"use_mrope": True})
    assert str(caught.value) == (
        "use_mrope = True is not supported, only False; hidden_size must be a positive integer, "
        "got '64'; rms_norm_eps must be a number above 0, got 0; tie_word_embeddings must be true "
        "or false, got 1"
    )
    wrong = {"eos_token_id": 320, "num_key_value_heads": 3, "rope_scaling": {"rope_type": "ntk"}}
    with pytest.raises(ValueError) as caught:
        parse_model_config(LLAMA | wrong)
    first, second, third = str(caught.value).split("; ", 2)
    assert first == "eos_token_id 320 is no id of a vocabulary of 320 tokens"
    assert second == "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"
    assert third.startswith("rope_type 'ntk' is not supported")


@pytest.mark.parametrize(
    ("config", "wrong", "said"),
    [
        (
            QWEN2,
            {"layer_types": ["full_attention"], "head_dim": None, "num_nextn_predict_layers": -1},
            ["layer_types has 1 entries for 4 layers", "num_nextn_predict_layers must be a number"],
        ),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "yarn", "factor": 0, "beta_fast": -1}},
            ["beta_fast must be a number", "factor must be a number above 0"],
        ),
    ],
)
def test_all_that_a_family_does_not_read_is_named_at_once(config: Any, wrong: Any, said: list[str]):
    with pytest.raises(ValueError) as caught:
        parse_model_config(config | wrong)
    parts = str(caught.value).split("; ")
    assert len(parts) == len(said), parts
    for part, text in zip(parts, said, strict=True):
        assert text in part
    declared = declared_keys("olmo2")
    assert declared is not None and declared["rms_norm_eps"] == 1e-5 and "clip_qkv" not in declared


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in CONFIG_MAPPING])
def test_declared_keys_are_the_fields_of_the_config_class(kind: str):
    declared, theirs = declared_keys(kind), type(transformers.AutoConfig.for_model(kind))
    assert declared is not None
    named = {name for name, what in theirs.__annotations__.items() if "ClassVar" not in str(what)}
    assert named <= declared.keys()
    for name in named & vars(theirs).keys():
        assert declared[name] in (COMPUTED, vars(theirs)[name])


QWEN4_INDEXER = {
    "indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_head_dim": 256,
    "indexer_kv_heads": 1, "indexer_n_heads": 2,
}  # fmt: skip
# Where transformers' own defaults are of a model that is not read: heads do not divide the hidden
# size, layers are recurrent, a text ends at what is no token, or two keys say how much of a head is
# rotated.
GIVEN: dict[str, dict[str, Any]] = {
    "arcee": {"eos_token_id": 2},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 32, "num_local_experts": 0},
    "minimax_m3_vl": {"text_config": {"partial_rotary_factor": 0.5}},
    "minimax_m3_vl_text": {"partial_rotary_factor": 0.5},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in CONFIG_MAPPING])
def test_absent_keys_take_the_defaults_of_transformers(kind: str):
    given = GIVEN.get(kind, {})
    theirs = transformers.AutoConfig.for_model(kind, **given)
    written = {key: value for key, value in theirs.to_dict().items() if value is not None}
    written.pop("_name_or_path", None)
    assert parse_model_config({"model_type": kind} | given) == parse_model_config(written)


@pytest.mark.parametrize(
    "more",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2},
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
        {"use_sliding_window": None, "sliding_window": None, "max_window_layers": 28},
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}},
    ],
)
def test_keys_without_effect_are_accepted(more: dict[str, Any]):
    assert parse_model_config(LLAMA | more) == parse_model_config(LLAMA)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_errors_say_whose_config_is_meant(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    content = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 320}
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^draft model's ") as caught:
        load_model_config(tmp_path, "draft model")
    assert f"{tmp_path / name}: eos_token_id 320 is no id" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionConfig(0, 1, RopeConfig(16, 1e4)), "num_heads must be above 0, got 0"),
        (lambda: AttentionConfig(4, 0, RopeConfig(16, 1e4)), "num_kv_heads must be above 0"),
        (lambda: AttentionConfig(4, 2, RopeConfig(16, 1e4), -1), "window must be above 0, got -1"),
        (lambda: RopeConfig(15, 1e4), "needs an even head_dim, not 15"),
        (lambda: RopeConfig(16, 0.0), "rope_theta must be above 0, got 0.0"),
        (lambda: Llama3RopeScaling(0.0, 1.0, 4.0, 8192), "factor must be above 0, got 0.0"),
        (lambda: DenseConfig(0), "intermediate_size must be above 0, got 0"),
        (lambda: ModelConfig(320, -64, 1e-5, 512, ()), "hidden_size must be above 0, got -64"),
        (lambda: ModelConfig(320, 64, 1e-5, 512, ()), "num_layers must be above 0, got 0"),
        (lambda: ModelConfig(320, 64, float("nan"), 512, ()), "rms_norm_eps must be above 0"),
    ],
)
def test_configs_of_ones_own_are_checked(make: Any, message: str):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        (GEMMA2 | {"final_logit_softcapping": 0}, "final_logit_softcapping must be a number above"),
        (GEMMA2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "must have full_attention and sliding"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0, at most 1"),
        (PHI3 | {"lm_head_bias": True}, "lm_head_bias = True is not supported"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        (SMOLLM3 | {"no_rope_layers": [2] * 4}, "no_rope_layers must be a list of 0 and 1"),
        (
            SMALL | {"model_type": "granite", "residual_multiplier": 0},
            "residual_multiplier must be",
        ),
    ],
)
def test_refused_in_other_families(raw: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config({"eos_token_id": 2} | raw)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ropes_that_depend_on_the_length_limit_it():
    assert parse_model_config(PHI3 | {"rope_scaling": LONGROPE}).max_position == 64
    old = LONGROPE | {"type": "su"}
    assert parse_model_config(PHI3 | {"rope_scaling": old}).max_position == 64
    equal = LONGROPE | {"short_factor": LONGROPE["long_factor"]}
    assert parse_model_config(PHI3 | {"rope_scaling": equal}).max_position == 512
    dynamic = parse_model_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert dynamic == parse_model_config(LLAMA)


def test_models_of_other_families_are_not_written():
    for raw in (GEMMA2, SMOLLM3, PHI3):
        with pytest.raises(ValueError, match="no supported Hugging Face family"):
            to_hf_config(parse_model_config({"eos_token_id": 2} | raw))


def test_the_callers_dict_is_left_alone():
    raw = json.loads(json.dumps(LLAMA_31_8B))
    parse_model_config(raw)
    assert raw == LLAMA_31_8B


@pytest.mark.parametrize(
    "content", [None, b"{", b"[]", b"[" * 100_000, b"1" * 5000, b"\xff{}", b"{}\n\n["]
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA_31_8B,
        QWEN25_7B,
        LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        MISTRAL | {"sliding_window": 8, "eos_token_id": None},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        QWEN3 | {"attention_bias": True},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        QWEN2
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 8,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_to_hf_config_round_trips(raw: dict[str, Any]):
    config = parse_model_config(raw)
    written = to_hf_config(config)
    assert parse_model_config(json.loads(json.dumps(written))) == config
    assert written["model_type"] == raw["model_type"]


def test_to_hf_config_refuses_what_no_family_has():
    def with_bias(layer: Any) -> Any:
        return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, bias=True))

    config = parse_model_config(QWEN2).map_layers(with_bias)
    with pytest.raises(ValueError, match="no supported Hugging Face family"):
        to_hf_config(config)
