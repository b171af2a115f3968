"""Files of ``published``: what each model and head is, or why it is refused.

published/README.md says where they come from.
"""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoints.formats import canonical, named_quantization
from jaxspec.config.checks import Problems
from jaxspec.config.entries import EntryAttentionConfig
from jaxspec.config.mixers import AttentionConfig, LatentConfig
from jaxspec.config.model import ModelConfig
from jaxspec.config.recurrent import RecurrentConfig
from jaxspec.models.from_config.block_head import block_config
from jaxspec.models.from_config.block_layouts import block_layout, says_block
from jaxspec.models.from_config.eagle_head import eagle_head_config
from jaxspec.models.from_config.model import parse_model_config

FOLDER = Path(__file__).parent / "published"

# Layers, heads, KV heads (1: latent attention keeps one vector for all heads), width of a head,
# vocabulary.
MODELS: dict[str, tuple[int, ...]] = {
    "aiconfigurator/MiniMaxAI--MiniMax-M3": (60, 64, 4, 128, 200064),
    "aiconfigurator/Qwen--Qwen3-0.6B": (28, 16, 8, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-1.7B": (28, 16, 8, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-235B-A22B-FP8": (94, 64, 4, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-235B-A22B": (94, 64, 4, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-30B-A3B-FP8": (48, 32, 4, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-32B-FP8-Static-PerTensor": (64, 64, 8, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-32B-FP8": (64, 64, 8, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-32B": (64, 64, 8, 128, 151936),
    "aiconfigurator/Qwen--Qwen3-Coder-480B-A35B-Instruct": (62, 96, 8, 128, 151936),
    "aiconfigurator/Qwen--Qwen3.5-122B-A10B": (48, 32, 2, 256, 248320),
    "aiconfigurator/Qwen--Qwen3.5-397B-A17B": (60, 32, 2, 256, 248320),
    "aiconfigurator/XiaomiMiMo--MiMo-7B-Base": (36, 32, 8, 128, 151680),
    "aiconfigurator/deepseek-ai--DeepSeek-R1": (61, 128, 1, 192, 129280),
    "aiconfigurator/deepseek-ai--DeepSeek-V4-Flash": (43, 64, 1, 512, 129280),
    "aiconfigurator/google--gemma-4-26B-A4B": (30, 16, 8, 256, 262144),
    "aiconfigurator/meta-llama--Meta-Llama-3.1-405B": (126, 128, 8, 128, 128256),
    "aiconfigurator/meta-llama--Meta-Llama-3.1-70B": (80, 64, 8, 128, 128256),
    "aiconfigurator/meta-llama--Meta-Llama-3.1-8B": (32, 32, 8, 128, 128256),
    "aiconfigurator/mistralai--Mixtral-8x22B-v0.1": (56, 48, 8, 128, 32000),
    "aiconfigurator/mistralai--Mixtral-8x7B-v0.1": (32, 32, 8, 128, 32000),
    "aiconfigurator/nvidia--DeepSeek-V3.1-NVFP4": (61, 128, 1, 192, 129280),
    "aiconfigurator/meta-llama--Llama-4-Scout-17B-16E-Instruct": (48, 40, 8, 128, 202048),
    "aiconfigurator/nvidia--Llama-3.1-70B-Instruct-FP8": (80, 64, 8, 128, 128256),
    "aiconfigurator/nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (52, 32, 2, 128, 131072),
    "aiconfigurator/nvidia--Nemotron-H-56B-Base-8K": (118, 64, 8, 128, 131072),
    "aiconfigurator/nvidia--Qwen3.5-122B-A10B-NVFP4": (48, 32, 2, 256, 248320),
    "aiconfigurator/openai--gpt-oss-120b": (36, 64, 8, 64, 201088),
    "quoted/OwenArli--broken-quant-GPTQModel": (64, 24, 4, 256, 248320),
    "quoted/qwen3-4b-gptq-3-bits": (36, 32, 8, 128, 151936),
}  # fmt: skip
# Why a model is refused.
REFUSED_MODELS: dict[str, str] = {
    "aiconfigurator/XiaomiMiMo--MiMo-V2-Flash": "model_type 'mimo_v2_flash'",
    "aiconfigurator/moonshotai--Kimi-K3": "model_type 'kimi_k3'",
    "aiconfigurator/stepfun-ai--Step-3.7-Flash-FP8": "architectures ['Step3p7FlashForCausalLM']",
}  # fmt: skip
# Quantized weights of models that are read: None, or why their format is refused.
QUANTIZED: dict[str, str | None] = {
    "aiconfigurator/Qwen--Qwen3-235B-A22B-FP8": None,
    "aiconfigurator/Qwen--Qwen3-30B-A3B-FP8": None,
    "aiconfigurator/Qwen--Qwen3-32B-FP8-Static-PerTensor": None,
    "aiconfigurator/Qwen--Qwen3-32B-FP8": None,
    "aiconfigurator/deepseek-ai--DeepSeek-R1": None,
    "aiconfigurator/deepseek-ai--DeepSeek-V4-Flash": None,
    "aiconfigurator/nvidia--Qwen3.5-122B-A10B-NVFP4": None,
    "aiconfigurator/openai--gpt-oss-120b": None,
    "quoted/OwenArli--broken-quant-GPTQModel": None,
    "quoted/qwen3-4b-gptq-3-bits": "bits is 3",
}  # fmt: skip
# Kind, layers, heads, KV heads, width of a head, rope theta, and the draft vocabulary (None: the
# target's), or of block heads the size of a block.
HEADS: dict[str, tuple[Any, ...]] = {
    "angelslim/qwen2-audio-7b-eagle3": ("eagle3", 1, 32, 4, 128, 10_000, 32000),
    "angelslim/qwen2.5-3b-eagle3": ("eagle3", 1, 16, 2, 128, 1_000_000, 32000),
    "angelslim/qwen2.5-7b-eagle3": ("eagle3", 1, 28, 4, 128, 1_000_000, 32000),
    "angelslim/qwen2.5-vl-7b-eagle3-mrope": ("eagle3", 1, 28, 4, 128, 1_000_000, 32000),
    "angelslim/qwen3-1.7b-eagle3": ("eagle3", 1, 16, 8, 128, 1_000_000, 32000),
    "angelslim/qwen3-30b-a3b-eagle3": ("eagle3", 1, 32, 4, 128, 1_000_000, 32000),
    "angelslim/qwen3-4b-eagle3": ("eagle3", 1, 32, 8, 128, 1_000_000, 32000),
    "angelslim/qwen3_dflash": ("dflash", 5, 32, 8, 128, 1_000_000, 16),
    "angelslim/qwen3-vl-4b-eagle3": ("eagle3", 1, 32, 8, 128, 5_000_000, 32000),
    "quoted/JetSpec--jetspec-Qwen3.6-35B-A3B": ("dflash", 8, 32, 4, 128, 10_000_000, 16),
    "quoted/RedHatAI--Kimi-K3-speculator.dspark": ("dspark", 5, 96, 16, 64, 10_000, 8),
    "quoted/RedHatAI--Qwen3.6-35B-A3B-speculator.dspark": ("dspark", 5, 16, 2, 256, 10_000, 8),
    "quoted/RedHatAI--gpt-oss-20b-speculator.eagle3": ("eagle3", 1, 64, 8, 64, 10_000, 64000),
    "quoted/XiaomiMiMo--MiMo-V2.5-Pro-DFlash": ("dflash", 5, 128, 8, 128, 10_000, 8),
    "quoted/deepseek-ai--dspark_qwen3_8b_block7": ("dspark", 5, 32, 8, 128, 10_000, 7),
    "quoted/nebius--EAGLE3-gpt-oss-20b": ("eagle3", 1, 64, 8, 64, 150_000, 64000),
    "quoted/UIUC-SSAIL--Qwen3-8B-XPress-b16": ("xpress", 5, 32, 8, 128, 1_000_000, 16),
    "quoted/z-lab--Qwen3.8-27B-DFlash2": ("dflash2", 5, 32, 8, 128, 10_000_000, 8),
    "quoted/ornith-ai--Ornith-1.5-35B-A3B-DFlash": ("dflash", 6, 32, 8, 128, 10_000_000, 16),
    "specforge/deepseek-v2-lite-eagle3": ("eagle3", 1, 16, 16, 128, 10_000, 32000),
    "specforge/deepseek-v3-671b-eagle3": ("eagle3", 1, 56, 8, 128, 10_000, 32000),
    "specforge/gemma3-1b-eagle3": ("eagle3", 1, 4, 1, 256, 1_000_000, 32000),
    "specforge/glm-5.2-dspark": ("dspark", 5, 64, 16, 64, 8_000_000, 7),
    "specforge/gpt-oss-120B-eagle3": ("eagle3", 1, 64, 8, 64, 10_000, 32000),
    "specforge/gpt-oss-20B-eagle3": ("eagle3", 1, 64, 8, 64, 10_000, 32000),
    "specforge/inkling-dspark": ("dspark", 5, 64, 16, 64, 8_000_000, 7),
    "specforge/kimi-k3-dspark": ("dspark", 5, 64, 16, 64, 10_000, 7),
    "specforge/lfm2.5-1.2b-instruct-dflash": ("dflash", 8, 32, 8, 64, 1_000_000, 16),
    "specforge/ling-flash-2.0-eagle3": ("eagle3", 1, 32, 8, 128, 10_000, 32000),
    "specforge/llama3-70B-ealge3": ("eagle3", 1, 64, 8, 128, 500_000, 32000),
    "specforge/llama3-8B-eagle3": ("eagle3", 1, 32, 8, 128, 10_000, 32000),
    "specforge/llama4-scout-17B-16E-eagle3": ("eagle3", 1, 40, 8, 128, 10_000, 32000),
    "specforge/longcat-flash-dflash": ("dflash", 5, 32, 8, 128, 1_000_000, 16),
    "specforge/longcat-flash-eagle3": ("eagle3", 1, 64, 16, 128, 10_000_000, 131072),
    "specforge/phi4-eagle3": ("eagle3", 1, 40, 10, 128, 250_000, 32000),
    "specforge/qwen2-5-vl-7b-eagle3": ("eagle3", 1, 28, 4, 128, 1_000_000, 32000),
    "specforge/qwen2.5-7b-eagle3": ("eagle3", 1, 28, 4, 128, 1_000_000, 16000),
    "specforge/qwen2.5-vl-32b-eagle3": ("eagle3", 1, 28, 4, 128, 1_000_000, 32000),
    "specforge/qwen3-235B-A22B-eagle3": ("eagle3", 1, 64, 4, 128, 1_000_000, 32000),
    "specforge/qwen3-30B-A3B-eagle3.1": ("eagle3", 1, 32, 4, 128, 1_000_000, 32000),
    "specforge/qwen3-8b-dflash": ("dflash", 5, 32, 8, 128, 1_000_000, 16),
    "specforge/qwen3-8b-domino": ("domino", 5, 32, 8, 128, 1_000_000, 16),
    "specforge/qwen3-8b-dspark": ("dspark", 5, 32, 8, 128, 1_000_000, 7),
    "specforge/qwen3-8b-peagle": ("eagle3", 4, 32, 8, 128, 1_000_000, 32000),
    "specforge/qwen3-8b-eagle3": ("eagle3", 1, 32, 8, 128, 1_000_000, 32000),
    "specforge/qwen3-next-80b-a3b-eagle3": ("eagle3", 1, 16, 2, 256, 10_000_000, 32000),
    "specforge/qwen3.5-35b-a3b-dflash": ("dflash", 8, 32, 4, 128, 10_000_000, 16),
    "specforge/qwen3.5-35b-a3b-eagle3": ("eagle3", 1, 16, 2, 256, 10_000_000, 32000),
    "specforge/qwen3.6-27b-dflash": ("dflash", 5, 32, 8, 128, 10_000_000, 16),
    "specforge/qwen3.6-27b-dspark": ("dspark", 5, 32, 8, 128, 10_000_000, 16),
    "specforge/qwq-32B-eagle3": ("eagle3", 1, 40, 8, 128, 1_000_000, 32000),
    "torchspec/dflash_draft_config": ("dflash", 5, 32, 8, 128, 1_000_000, 16),
    "torchspec/kimi_k25_eagle3": ("eagle3", 1, 64, 64, 128, 50_000, None),
    "torchspec/minimax_m25_eagle3": ("eagle3", 1, 48, 48, 128, 5_000_000, None),
    "torchspec/qwen3_8b_eagle3": ("eagle3", 1, 32, 8, 128, 1_000_000, 32000),
}  # fmt: skip
# Windows of block heads, and the layers that are causal inside of a block; of others none.
SEEN: dict[str, tuple[list[int | None], str]] = {
    "quoted/JetSpec--jetspec-Qwen3.6-35B-A3B": ([None] * 8, "all"),
    "quoted/RedHatAI--Kimi-K3-speculator.dspark": ([2048] * 5, "windows"),
    "quoted/RedHatAI--Qwen3.6-35B-A3B-speculator.dspark": ([2048] * 5, "windows"),
    "quoted/XiaomiMiMo--MiMo-V2.5-Pro-DFlash": ([1024] * 5, "none"),
    "quoted/ornith-ai--Ornith-1.5-35B-A3B-DFlash": ([4096] * 5 + [None], "windows"),
    "quoted/z-lab--Qwen3.8-27B-DFlash2": ([2048] * 5, "none"),
    "specforge/qwen3.6-27b-dflash": ([2048] * 4 + [None], "windows"),
}
REDUCED = {"quoted/RedHatAI--Qwen3.6-35B-A3B-speculator.dspark": 32000}  # draft vocabularies
# Why a head is refused.
REFUSED_HEADS: dict[str, str] = {
    "angelslim/cosyvoice3-llm-eagle3": "['CosyVoice3Eagle3LlamaForCausalLM'] is not a supp",
    "angelslim/hunyuan-1.8b-eagle3": "unknown key 'add_classification_head' (= False)",
    "torchspec/kimi_k25_eagle3_mla": "architectures ['Eagle3DeepseekV2ForCausalLM'] is not a sup",
}  # fmt: skip
# Keys that a model's file has and transformers does not read.
IGNORED = {
    "aiconfigurator/Qwen--Qwen3-Coder-480B-A35B-Instruct": (
        "qkv_bias, shared_expert_intermediate_size, use_qk_norm"
    ),
}


def contents(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def sizes(config: ModelConfig) -> tuple[int, ...]:
    """Layers, and of those that are not recurrent heads, KV heads and their width."""
    mixers = (mixer for layer in config.layers for mixer in layer.mixers)
    mixer = next(one for one in mixers if not isinstance(one, RecurrentConfig))
    if isinstance(mixer, LatentConfig):
        return config.num_layers, mixer.num_heads, 1, mixer.query_dim
    if isinstance(mixer, EntryAttentionConfig):
        return config.num_layers, mixer.num_heads, 1, mixer.head_dim
    assert isinstance(mixer, AttentionConfig)
    return config.num_layers, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim


def target_of(head: dict[str, Any]) -> ModelConfig:
    """A target that a head fits, of 93 layers where its file does not say how many."""
    layer = head.get("transformer_layer_config", head)
    return parse_model_config(
        {
            "model_type": "llama",
            "head_dim": 128,
            "hidden_size": head.get("target_hidden_size") or layer["hidden_size"],
            "num_hidden_layers": head.get("target_num_hidden_layers")
            or head.get("num_target_layers")
            or 93,
            "vocab_size": layer["vocab_size"],
        }
    )


def read_head(name: str) -> tuple[Any, ...]:
    """As HEADS has them."""
    raw = contents(name)
    if says_block(raw):
        block = block_config(raw, target_of(raw))
        windows = [layer.attention.window for layer in block.model.layers]
        none: list[int | None] = [None] * len(windows)
        assert block.draft_vocab_size == REDUCED.get(name)
        assert (windows, block.causal) == SEEN.get(name, (none, "none"))
        kind = block_layout(raw, Problems()).kind
        assert block.predicts_next == (kind in ("dspark", "domino"))
        model, last = block.model, block.block_size
    else:
        head = eagle_head_config(raw, target_of(raw))
        kind, model, last = head.method, head.model, head.draft_vocab_size
    mixer = model.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return kind, *sizes(model), mixer.rope.theta, last


@pytest.mark.parametrize(
    ("name", "window"),
    [("llama3-8B-eagle3", 2048), ("gpt-oss-20B-eagle3", 4096), ("deepseek-v3-671b-eagle3", None)],
)
def test_heads_of_few_positions_see_as_many_tokens(name: str, window: int | None):
    raw = contents(f"specforge/{name}")
    target = dataclasses.replace(target_of(raw), max_position=131_072)
    [layer] = eagle_head_config(raw, target).model.layers
    assert layer.attention.window == window


def test_every_file_has_a_row():
    files = {f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.json")}
    tables = (MODELS, REFUSED_MODELS, HEADS, REFUSED_HEADS)
    assert sorted(files) == sorted(name for table in tables for name in table)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read(name: str):
    raw = contents(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = parse_model_config(raw)
    assert (*sizes(config), config.vocab_size) == MODELS[name]
    said = [str(one.message).rpartition("does not read: ")[2] for one in caught]
    assert said == ([IGNORED[name]] if name in IGNORED else [])
    assert (named_quantization(raw) is not None) == (name in QUANTIZED)


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_a_model_is_refused_for_a_reason(name: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(contents(name))
    assert str(caught.value).startswith(REFUSED_MODELS[name])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_fields_of_a_quantization_are_read_or_named(name: str):
    message, quantization = QUANTIZED[name], named_quantization(contents(name))
    if message is None:
        assert canonical(quantization, {}) == {}
    else:
        with pytest.raises(ValueError) as caught:
            canonical(quantization, {})
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_read(name: str):
    assert read_head(name) == HEADS[name]


@pytest.mark.parametrize("name", REFUSED_HEADS)
def test_a_head_is_refused_for_a_reason(name: str):
    with pytest.raises(ValueError) as caught:
        read_head(name)
    assert REFUSED_HEADS[name] in str(caught.value) and "\n" not in str(caught.value)
