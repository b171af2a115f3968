"""EAGLE-3 configs as SpecForge and AngelSlim publish them: each says what its head is."""

from typing import Any

import pytest

from jaxspec.config.rope import Llama3RopeScaling
from jaxspec.models.from_config.eagle_head import eagle_head_config
from jaxspec.models.from_config.model import parse_model_config

# Fields of the templates at sgl-project/SpecForge a6b6b02 (configs/) and Tencent/AngelSlim 67394ce
# (angelslim/compressor/speculative/train/configs/), for dense Llama and Qwen targets.
COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}
QWEN = COMMON | {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
FORGE = QWEN | {"architectures": ["LlamaForCausalLMEagle3"]}
FORGE_QWEN3 = FORGE | {
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
}
FORGE_QWEN25 = FORGE | {
    "attention_bias": False,
    "draft_vocab_size": 16000,
    "max_position_embeddings": 32768,
    "rope_scaling": None,
    "sliding_window": 131072,
}
SLIM = QWEN | {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True}
SLIM_QWEN3 = SLIM | {
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "target_model_type": "qwen3",
}
SLIM_QWEN25 = SLIM | {
    "eos_token_id": 151643,
    "target_model_type": "qwen2.5",
    "use_mrope": False,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "llama3",
}
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "max_window_layers",
)  # fmt: skip
UNTIED, BIG_VOCAB = {"tie_word_embeddings": False}, {"vocab_size": 152064}
SHORT = {"max_position_embeddings": 32768, "sliding_window": 32768}
LONG = {"max_position_embeddings": 131072, "sliding_window": 131072}
TEMPLATES: dict[str, tuple[dict[str, Any], tuple[int | None, ...], dict[str, Any]]] = {
    "SpecForge llama3-8B": (
        LLAMA, (4096, 14336, 32, 8, None),
        {"eos_token_id": 128001, "max_position_embeddings": 2048, "torch_dtype": "float16"},
    ),
    "SpecForge llama3-70B": (
        LLAMA, (8192, 28672, 64, 8, None),
        {"eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 4096,
         "torch_dtype": "float16", "head_dim": 128, "rope_theta": 500000.0,
         "rope_scaling": LLAMA3_ROPE},
    ),
    "SpecForge qwen2.5-7b": (FORGE_QWEN25, (3584, 18944, 28, 4, 28), BIG_VOCAB),
    "SpecForge qwen3-8b": (FORGE_QWEN3, (4096, 12288, 32, 8, 36), {}),
    "SpecForge qwq-32B": (
        FORGE, (5120, 27648, 40, 8, 64),
        BIG_VOCAB | {"model_type": "qwen2", "rms_norm_eps": 1e-5, "sliding_window": 32768,
                     "max_position_embeddings": 40960},
    ),
    "AngelSlim qwen2.5-3b": (SLIM_QWEN25, (2048, 11008, 16, 2, 36), SHORT),
    "AngelSlim qwen2.5-7b": (
        SLIM_QWEN25, (3584, 18944, 28, 4, 28), LONG | BIG_VOCAB | UNTIED,
    ),
    "AngelSlim qwen3-4b": (SLIM_QWEN3, (2560, 9728, 32, 8, 36), {}),
    "AngelSlim qwen3-8b": (SLIM_QWEN3, (4096, 12288, 32, 8, 36), UNTIED),
}  # fmt: skip


def template(name: str) -> dict[str, Any]:
    base, sizes, more = TEMPLATES[name]
    given = zip(SIZES, sizes, strict=True)
    return base | {key: size for key, size in given if size is not None} | more


def target_of(head: dict[str, Any]):
    """A target of the head's width and vocabulary, as the template is for."""
    keys = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    wanted = {key: head[key] for key in keys} | {"num_hidden_layers": 36, "head_dim": 128}
    return parse_model_config({"model_type": "qwen3", "intermediate_size": 1024} | wanted)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_published_template_is_understood(name: str):
    raw = template(name)
    target = target_of(raw)
    head = eagle_head_config(raw, target)
    assert (head.method, head.draft_vocab_size) == ("eagle3", raw["draft_vocab_size"])
    assert (head.capture, head.model.num_layers) == ((2, 18, 33), 1)
    [layer] = head.model.layers
    own = layer.attention
    assert (own.num_heads, own.num_kv_heads) == (
        raw["num_attention_heads"], raw["num_key_value_heads"],
    )  # fmt: skip
    assert own.head_dim == raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    assert own.rope.theta == raw.get("rope_theta", 10000.0)
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 4096) if "70B" in name else None
    assert own.rope.scaling == scaling
    assert (own.window, own.qkv_bias, own.o_bias, own.qk_norm) == (None, False, False, False)
    assert layer.mlp.intermediate_size == raw["intermediate_size"]
    assert not (head.fc_norm or head.norm_before_fc or head.norm_output)
