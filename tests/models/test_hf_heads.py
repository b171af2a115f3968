"""config.json of draft heads: what is understood, and what is refused."""

from typing import Any

import pytest

from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.eagle_head import eagle_head_config
from jaxspec.models.from_config.model import parse_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
TARGET = parse_model_config(LLAMA | {"num_hidden_layers": 12})
HEAD = LLAMA | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
HEAD3 = HEAD | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 96}
IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.8.0",
    "draft_vocab_size": 96,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": HEAD | {"model_type": "llama"},
}
FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def test_an_eagle3_head():
    head = eagle_head_config(HEAD3, TARGET)
    assert (head.method, head.draft_vocab_size, head.capture) == ("eagle3", 96, (2, 6, 9))
    assert (head.fc_bias, head.has_embeddings, head.model.num_layers) == (False, False, 1)


def test_an_eagle1_head():
    head = eagle_head_config(HEAD, TARGET)
    assert (head.method, head.draft_vocab_size, head.capture) == ("eagle1", None, (FINAL_NORM,))
    assert (head.fc_bias, head.has_embeddings) == (True, True)
    assert not eagle_head_config(HEAD | {"bias": False}, TARGET).fc_bias


def test_qwen2_heads_are_llama_layers_with_a_bias_of_their_own():
    raw = HEAD | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
    }
    [layer] = eagle_head_config(raw, TARGET).model.layers
    own = layer.attention
    assert (own.qkv_bias, own.o_bias, own.window) == (True, False, None)


def test_the_targets_layer_types_beside_an_unused_window_say_nothing():
    unused = {"use_sliding_window": False, "layer_types": ["full_attention"] * 12}
    assert eagle_head_config(HEAD3 | unused, TARGET) == eagle_head_config(HEAD3, TARGET)


@pytest.mark.parametrize(
    "copied",
    [
        {"eos_token_id": 400},  # DeepSeek-V3's template has an id outside the vocabulary
        {
            "decoder_sparse_step": 1,
            "num_experts": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
        {"model_type": "phi3"},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
        {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 12},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "image_token_id": 7},
        {"modal_type": "VLM", "target_model_type": "qwen3_vl", "ttt_length": 7},
        {"lk_loss_type": "lambda", "kl_scale": 1.0, "kl_decay": 1.0, "truncated_vocab_size": 96},
        {"tie_word_embeddings": True, "pretraining_tp": 1},
    ],
)
def test_what_was_copied_from_the_target_says_nothing(copied: dict[str, Any]):
    assert eagle_head_config(HEAD3 | copied, TARGET) == eagle_head_config(HEAD3, TARGET)


def test_a_draft_vocabulary_under_another_name_or_none():
    named = {"draft_vocab_size": None, "truncated_vocab_size": 96}
    assert eagle_head_config(HEAD3 | named, TARGET).draft_vocab_size == 96
    assert eagle_head_config(HEAD3 | {"draft_vocab_size": 0}, TARGET).draft_vocab_size is None


def test_windows_of_as_many_layers_as_the_head_has_are_its_own():
    window = {"layer_types": ["sliding_attention"], "sliding_window": 64}
    [layer] = eagle_head_config(HEAD3 | window, TARGET).model.layers
    assert layer.attention.window == 64


@pytest.mark.parametrize(
    ("given", "target_positions", "window"),
    [
        ({"max_position_embeddings": 128}, 512, 128),
        ({"max_position_embeddings": 512}, 512, None),
        ({"max_position_embeddings": 1024}, 512, None),
        ({"max_position_embeddings": None}, 4096, None),  # a file that does not say
        (
            {
                "max_position_embeddings": 128,
                "layer_types": ["sliding_attention"],
                "sliding_window": 64,
            },
            512,
            64,
        ),
    ],
)
def test_a_head_with_fewer_positions_than_the_target_sees_as_many(
    given: dict[str, Any], target_positions: int, window: int | None
):
    target = parse_model_config(
        LLAMA | {"num_hidden_layers": 12, "max_position_embeddings": target_positions}
    )
    for head in (HEAD3, HEAD):
        raw = {key: value for key, value in (head | given).items() if value is not None}
        [layer] = eagle_head_config(raw, target).model.layers
        assert layer.attention.window == window


def test_layers_of_the_speculators_library_may_be_qwen3s():
    raw = SPECULATORS | {"transformer_layer_config": HEAD | {"model_type": "qwen3"}}
    [layer] = eagle_head_config(raw, TARGET).model.layers
    assert layer.attention.qk_norm


@pytest.mark.parametrize(
    ("extra", "capture"),
    [
        ({IDS: [1, 5, 8]}, (1, 5, 8)),
        ({IDS: [8, 2, 12]}, (2, 8, 12)),
        ({"eagle_config": {IDS: [1, 5, 8], "use_aux_hidden_state": True}}, (2, 6, 9)),
        ({"eagle_config": {IDS: [2, 5, 8]}}, (2, 5, 8)),
        ({"eagle_config": {IDS: None}}, (2, 6, 9)),
        ({IDS: [5]}, (5,)),
        ({IDS: [1, 3, 5, 7, 9], "num_aux_hidden_states": 5}, (1, 3, 5, 7, 9)),
    ],
)
def test_captured_layers(extra: dict[str, Any], capture: tuple[int, ...]):
    assert eagle_head_config(HEAD3 | extra, TARGET).capture == capture


@pytest.mark.parametrize(
    ("raw", "on"),
    [
        (HEAD3, ()),
        (HEAD3 | {"fc_norm": True, "norm_output": True}, ("fc_norm", "norm_output")),
        (HEAD3 | {"use_aux_norm": True}, ("fc_norm",)),
        (HEAD3 | {"eagle_config": {"use_aux_norm": True}}, ("fc_norm",)),
        (HEAD3 | {"eagle_config": {"norm_before_fc": True}}, ("norm_before_fc",)),
        (HEAD3 | {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, ()),
        (HEAD3 | {"norm_before_fc": True, "eagle_config": {"norm_before_fc": None}},
         ("norm_before_fc",)),
        (HEAD3 | {"eagle_config": {"return_hidden_post_norm": True}}, ("norm_output",)),
        (HEAD3 | {"norm_before_residual": True}, ("norm_before_residual",)),
        (SPECULATORS, ("norm_before_residual",)),
        (SPECULATORS | {"norm_before_residual": False, "fc_norm": True}, ("fc_norm",)),
    ],
)  # fmt: skip
def test_options_of_eagle_31(raw: dict[str, Any], on: tuple[str, ...]):
    config = eagle_head_config(raw, TARGET)
    assert config.method == "eagle3"
    assert tuple(flag for flag in FLAGS if getattr(config, flag)) == on


def test_a_config_of_the_speculators_library_is_a_flat_one_folded():
    flat = eagle_head_config(HEAD3 | {"norm_before_residual": True}, TARGET)
    assert eagle_head_config(SPECULATORS, TARGET) == flat
    published = SPECULATORS | {
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
    }
    assert eagle_head_config(published, TARGET) == flat


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (HEAD3 | {"vocab_size": 321}, "its vocab_size is 321, not 320"),
        (HEAD3 | {"target_hidden_size": 128}, "its target_hidden_size is 128, not 64"),
        (HEAD | {"hidden_size": 128}, "its hidden_size is 128, the target's is 64"),
        (HEAD3 | {"draft_vocab_size": 321}, "draft_vocab_size 321"),
        (HEAD3 | {"draft_vocab_size": -1}, "draft_vocab_size must be a positive integer, got -1"),
        (HEAD3 | {"truncated_vocab_size": 64},
         "draft_vocab_size = 96 and truncated_vocab_size = 64 contradict each other"),
        (HEAD3 | {"layer_types": ["linear_attention"]}, "'linear_attention' is not supported"),
        (HEAD3 | {"layer_types": ["sliding_attention"]}, "but no sliding_window is in use"),
        (HEAD3 | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        (HEAD3 | {"architectures": 3}, "architectures must be a list of names, got 3"),
        (HEAD3 | {"eagle_config": [1]}, "eagle_config must be an object, got [1]"),
        (HEAD3 | {"bias": "no"}, "bias must be true or false, got 'no'"),
        (HEAD3 | {IDS: 5}, f"{IDS} must be a list of layers, got 5"),
        (HEAD3 | {"eagle_config": {IDS: [1, "5"]}}, f"{IDS} must be a list of layers, got [1, '5'"),
        (HEAD3 | {IDS: [2, 6, 13]}, "layer_ids: a head cannot read layers [2, "),
        (HEAD | {IDS: [2, 6, 9]}, "this is an EAGLE-1 head"),
        (HEAD3 | {"norm_before_residual": 1}, "norm_before_residual must be true or false, got 1"),
        (HEAD3 | {"use_aux_hidden_state": False}, "use_aux_hidden_state = False"),
        (HEAD3 | {IDS: [5], "num_aux_hidden_states": 3}, "num_aux_hidden_states is 3, not 1"),
        (HEAD | {"norm_output": True}, "norm_output: for EAGLE-3 heads"),
        (HEAD3 | {"norm_output": "yes"}, "norm_output must be true or false, got 'yes'"),
        (HEAD3 | {"fc_norm": True, "eagle_config": {"norm_before_fc": True}}, "are both on"),
        (HEAD3 | {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        (HEAD3 | {"eagle_config": {"new_feature": 1}}, "unknown key 'new_feature'"),
        (HEAD3 | {"norm_after_fc": True}, "unknown key 'norm_after_fc'"),
        (SPECULATORS | {"speculators_model_type": "eagle"}, "speculators_model_type = 'eagle'"),
        (SPECULATORS | {"architectures": ["LlamaForCausalLM"]}, "is not a supported EAGLE head"),
        (SPECULATORS | {"transformer_layer_config": None}, "must be an object, got None"),
        (SPECULATORS | {"embed_scale": 2.0}, "speculators library: unknown key 'embed_scale'"),
        (SPECULATORS | {"transformer_layer_config": HEAD | {"model_type": "gemma2"}},
         "'gemma2' is not supported for a draft head, only"),
    ],
)  # fmt: skip
def test_refused_heads(raw: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        eagle_head_config(raw, TARGET)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_with_a_head_is_named_at_once():
    wrong = {"norm_after_fc": True, "use_aux_hidden_state": False, "num_attention_heads": 0}
    wrong |= {"draft_vocab_size": -1, "mask_token_id": 9999, "norm_output": 7}
    raw = HEAD3 | wrong | {"eagle_config": {"new_feature": 1}, "bias": 3}
    with pytest.raises(ValueError) as caught:
        eagle_head_config(raw, TARGET)
    for part in (*wrong, "new_feature", "bias must be true or false"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"unknown key 'embed_scale'.*draft_vocab_size must be"):
        eagle_head_config(SPECULATORS | {"embed_scale": 2.0, "draft_vocab_size": -1}, TARGET)
    with pytest.raises(ValueError, match=r"vocab_size is 321, not 320; .*draft_vocab_size 400 is"):
        eagle_head_config(HEAD3 | {"vocab_size": 321, "draft_vocab_size": 400}, TARGET)


def test_a_config_that_says_eagle3_over_weights_that_do_not():
    with pytest.raises(ValueError, match="config says EAGLE-3"):
        eagle_head_config(HEAD3, TARGET, "eagle1")
