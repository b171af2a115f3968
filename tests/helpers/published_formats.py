"""Quantized checkpoints as they are published: names and fields, shards with an index, plain
tensors in bfloat16, a tokenizer. Weights are random, and written from the formats' descriptions."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.torch import save_file

from tests.helpers import four_bit_checkpoints as four_bits
from tests.helpers.checkpoints import add_mtp_layer, save_byte_tokenizer
from tests.helpers.deepseek_v4_checkpoints import as_published
from tests.helpers.families import save_family
from tests.helpers.glm5_next_checkpoints import TEXT as GLM5_NEXT
from tests.helpers.hybrid_checkpoints import VISION, contents
from tests.helpers.minimax_m3_checkpoints import TEXT as MINIMAX_M3
from tests.helpers.quantized_checkpoints import (
    Format,
    Tensors,
    awq,
    compressed,
    compressed_blocks,
    float8_blocks,
    float8_channel,
    float8_static,
    gptq,
    modelopt_float8,
    mxfp8,
    mxfp8_by_name,
    of_torch,
)

Contents = tuple[Tensors, dict[str, Any]]
# Not in bfloat16 where all others are: corrections of routers, and decays of recurrent layers.
IN_FLOAT32 = ("e_score_correction_bias", "expert_bias", "A_log", "gate.bias", "attn_sink")
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}
PROJECTIONS = tuple(
    f"{name}.weight"
    for name in (
        *("proj", "proj_with_mqa", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
        *("input_linear", "output_linear", "w1", "w2", "w3"),
    )
)
PLAIN = tuple(f"{name}.weight" for name in ("in_proj_a", "in_proj_b", "in_proj_ba", "eh_proj"))


@dataclasses.dataclass(frozen=True)
class Published:
    """A checkpoint as someone publishes it.

    Attributes:
      source: makes a dense checkpoint in a directory.
      form: of its quantized modules, with the fields of ``quantization_config`` that it always has.
      quantizes: whether a tensor of the source is, by its name.
      others: the form of those that are not of experts; None: the same.
      fields: further ones of ``quantization_config``.
      wrapped: what a file of text and images makes of names and config.
      file: that ``quantization_config`` is in.
    """

    source: Callable[[Path], Path]
    form: Format
    quantizes: Callable[[str], bool]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    wrapped: Callable[[Contents], Contents] | None = None
    file: str = "config.json"
    others: Format | None = None

    def form_of(self, name: str) -> Format:
        return self.form if self.others is None or is_of_expert(name) else self.others


def of_family(name: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda directory: save_family(directory, name, **changes)


def with_mtp(name: str, layout: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda directory: add_mtp_layer(save_family(directory, name, **changes), layout)


def is_projection(name: str) -> bool:
    """Of attention, MLPs, experts and recurrences; not routers, norms, convolutions, heads, and
    what joins the inputs of an MTP layer."""
    return name.endswith(PROJECTIONS) and not name.endswith(PLAIN)


def is_of_text(name: str) -> bool:
    return is_projection(name) and not any(part in name for part in ("vision", "projector"))


def is_of_expert(name: str) -> bool:
    return ".experts." in name


def is_of_glm5_next(name: str) -> bool:
    """Neither of its recurrences and its indexers, nor what makes keys and values of latents."""
    plain = (".visual.", ".layers.0.self_attn.", ".indexer.", ".kv_b_proj.")
    return is_projection(name) and not any(part in name for part in plain)


def is_of_ling(name: str) -> bool:
    """All projections of its recurrences, too."""
    return is_projection(name) or name.endswith(".dense.weight")


def is_of_ling_but_recurrences(name: str) -> bool:
    return is_of_ling(name) and re.search(r"layers\.[02]\.attention", name) is None


def is_of_deepseek_v4(name: str) -> bool:
    """Neither what makes entries, nor the weights of an indexer's heads."""
    found = re.search(r"\.(w[123]|w[qo]_[ab]|wkv)\.weight$", name)
    return found is not None and ".compressor." not in name


def as_deepseek_v4(own: Contents) -> Contents:
    tensors, raw = own
    named = {as_published(name): tensor for name, tensor in tensors.items()}
    return named, raw | {"expert_dtype": "fp4"}


def with_rounded_table(own: Contents) -> Contents:
    """With n-grams in 8-bit floats, which are multiplied by one number."""
    tensors, raw = own
    scale = np.array([0.01], np.float32)
    for name in [name for name in tensors if ".ngram_embedding.shard_" in name]:
        tensors[name] = (tensors[name] / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name.rpartition('.shard_')[0]}.weight_scale"] = scale
    return tensors, raw | {"ple_embedding_dtype": "float8_e4m3fn"}


def as_images_and_text(own: Contents) -> Contents:
    """As Qwen 3.5 has it."""
    tensors, inner = own
    quantization = inner.pop("quantization_config")
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}" if "model." in name[:6] else name: x
        for name, x in tensors.items()
    }
    tensors["model.visual.pos_embed.weight"] = np.ones((16, 32), np.float32)
    raw = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": inner,
        "vision_config": VISION,
        "image_token_id": 5,
        "quantization_config": quantization,
    }
    return tensors, raw


def as_kimi(own: Contents) -> Contents:
    tensors, raw = own
    return tensors, raw | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}


LISTED_BY_QWEN = [
    *("lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"),
    *("model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm"),
    *("model.layers.1.mlp.gate", "model.layers.1.post_attention_layernorm"),
]
LISTED_BY_QWEN_3_5 = [
    *("lm_head", "model.language_model.embed_tokens", "model.visual.pos_embed"),
    *(f"model.language_model.layers.{i}.mlp.gate" for i in range(4)),
    *(f"model.language_model.layers.{i}.mlp.shared_expert_gate" for i in range(4)),
    *(f"model.language_model.layers.{i}.linear_attn.{x}" for i in (0, 2) for x in ("conv1d",)),
    *(f"model.language_model.layers.{i}.linear_attn.in_proj_{x}" for i in (0, 2) for x in "ab"),
    *("mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"),
]
LISTED_BY_GLM5_NEXT = [
    *("lm_head", "model.visual", "model.language_model.embed_tokens"),
    *(f"model.language_model.layers.0.self_attn.{x}_proj" for x in ("q", "k", "v", "o", "b")),
    *(f"model.language_model.layers.0.self_attn.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b")),
    *(f"model.language_model.layers.{i}.mlp.gate" for i in (1, 2)),
    *(f"model.language_model.layers.{i}.self_attn.kv_b_proj" for i in (1, 2)),
    "model.language_model.layers.1.self_attn.indexer",
]
LISTED_BY_LING = [
    *("lm_head", "model.word_embeddings", "model.layers.0.attention", "model.layers.2.attention"),
    *(f"model.layers.{i}.mlp.gate" for i in (1, 2)),
]
WHOLE_GROUPS = MINIMAX_M3 | {"intermediate_size": 64, "shared_intermediate_size": 64}
BLOCKS, INT4, NVFP4 = float8_blocks(), compressed(4, 32), four_bits.nvfp4()
MODELOPT = four_bits.modelopt()
OF_MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.33.1"},
    "ignore": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
}
ONLY_EXPERTS = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|down)_proj.*",
]
# Of a mix, by names of the file.
MIXED_GROUPS = {
    "experts": INT4.config["config_groups"]["group_0"]
    | {"format": "pack-quantized", "targets": [r"re:.*\.experts\..*"]},
    "others": compressed_blocks().config["config_groups"]["group_0"]
    | {
        "format": "float-quantized",
        "targets": [r"re:.*\.(attention|shared_experts)\..*", r"re:.*\.mlp\.\w+_proj$"],
    },
}
ALL_PLAIN: dict[str, Any] = {"ignore": ["lm_head", "*mixer.*_proj", "*shared_experts*"]}

PUBLISHED = MappingProxyType(
    {
        # Experts.
        "Qwen3-MoE, FP8": Published(
            of_family("qwen3_moe"),
            BLOCKS,
            is_projection,
            {"modules_to_not_convert": LISTED_BY_QWEN},
        ),
        "Qwen 3.5 with experts, FP8": Published(
            with_mtp("qwen3_5_moe_text", "qwen"),
            BLOCKS,
            is_projection,
            {"modules_to_not_convert": LISTED_BY_QWEN_3_5},
            wrapped=as_images_and_text,
        ),
        "DeepSeek-V3, FP8": Published(with_mtp("deepseek_v3", "deepseek"), BLOCKS, is_projection),
        "Kimi K2, INT4": Published(
            of_family("deepseek_v3", **EXPERTS),
            INT4,
            is_of_expert,
            {"ignore": ONLY_EXPERTS},
            as_kimi,
        ),
        "Qwen3-MoE, NVFP4 of ModelOpt": Published(
            of_family("qwen3_moe", **EXPERTS), MODELOPT, is_projection, OF_MODELOPT
        ),
        "Qwen3-MoE, NVFP4": Published(of_family("qwen3_moe", **EXPERTS), NVFP4, is_projection),
        "GLM-4.5, FP8 of compressed-tensors": Published(
            of_family("glm4_moe"), float8_channel(), is_projection
        ),
        "Qwen3-MoE, FP8 blocks of compressed-tensors": Published(
            of_family("qwen3_moe"), compressed_blocks(), is_projection
        ),
        "Qwen3-MoE, AWQ": Published(of_family("qwen3_moe", **EXPERTS), awq(32), is_projection),
        "Qwen3-MoE, GPTQ": Published(
            of_family("qwen3_moe", **EXPERTS), gptq(4, 32, symmetric=False), is_projection
        ),
        "Qwen3-Next, FP8": Published(with_mtp("qwen3_next", "qwen"), BLOCKS, is_projection),
        "MiniMax-M2, FP8": Published(
            of_family("minimax_m2"), BLOCKS, is_projection, {"modules_to_not_convert": ["gate"]}
        ),
        "MiniMax M3, MXFP8": Published(
            of_family("minimax_m3", text_config=WHOLE_GROUPS),
            mxfp8_by_name(),
            is_of_text,
            {"ignored_layers": ["lm_head", "vision_tower", "patch_merge_mlp"]},
        ),
        "MiniMax M3, NVFP4 of ModelOpt": Published(
            of_family("minimax_m3", text_config=WHOLE_GROUPS),
            MODELOPT,
            is_of_expert,
            {"ignore": ["lm_head", "*self_attn*", "*shared_experts*", "*mlp.*_proj", "vision_*"]},
        ),
        "GLM-5.2, FP8": Published(
            of_family("glm_moe_dsa"),
            BLOCKS,
            lambda name: is_projection(name) and "weights_proj" not in name,
            {"scale_fmt": "ue8m0"},
        ),
        "GLM-5-Next, FP8": Published(
            of_family("glm5_next"),
            BLOCKS,
            is_of_glm5_next,
            {"modules_to_not_convert": LISTED_BY_GLM5_NEXT},
        ),
        "DeepSeek-V4": Published(
            of_family("deepseek_v4", **EXPERTS),
            four_bits.deepseek(),
            is_of_deepseek_v4,
            wrapped=as_deepseek_v4,
            others=float8_blocks("scale", ml_dtypes.float8_e8m0fnu),
        ),
        "Ling 3, FP8": Published(
            of_family("bailing_hybrid"),
            BLOCKS,
            is_of_ling,
            {"modules_to_not_convert": ["lm_head", *LISTED_BY_LING[-2:]]},
        ),
        "Ling 3, INT4 experts": Published(
            of_family("bailing_hybrid", **EXPERTS),
            INT4,
            is_of_expert,
            {"ignore": ["lm_head", "re:.*attention.*", *ONLY_EXPERTS[2:]]},
        ),
        "Ling 3, FP8 with experts in INT4": Published(
            of_family("bailing_hybrid", **EXPERTS),
            INT4,
            is_of_ling_but_recurrences,
            {
                "format": "mixed-precision",
                "ignore": LISTED_BY_LING,
                "config_groups": MIXED_GROUPS,
            },
            others=compressed_blocks(),
        ),
        "GLM-5-Next, INT4 experts": Published(
            of_family("glm5_next", text_config=GLM5_NEXT | EXPERTS),
            INT4,
            is_of_expert,
            {"ignore": ["lm_head", "re:.*visual.*", *ONLY_EXPERTS[1:]]},
        ),
        "Qwen3.8-Flash-Next, FP8 experts and n-grams": Published(
            of_family("qwen4_exp"),
            BLOCKS,
            is_of_expert,
            {"modules_to_not_convert": ["self_attn", "linear_attn", "ple", "shared_expert"]},
            wrapped=with_rounded_table,
        ),
        "DeepSeek-V3, experts as those of V4": Published(
            of_family("deepseek_v3", **EXPERTS),
            four_bits.deepseek(),
            is_of_expert,
            {"modules_to_not_convert": ONLY_EXPERTS},
        ),
        "Kimi K2, MXFP4": Published(
            of_family("deepseek_v3", **EXPERTS),
            four_bits.mxfp4(),
            is_of_expert,
            {"ignore": ONLY_EXPERTS},
            as_kimi,
        ),
        "Nemotron 3, FP8 of ModelOpt": Published(
            of_family("nemotron_h"), modelopt_float8(), is_projection
        ),
        "Nemotron 3, NVFP4 of ModelOpt": Published(
            of_family("nemotron_h", moe_intermediate_size=64, eos_token_id=None),
            MODELOPT,
            is_of_expert,
            ALL_PLAIN,
        ),
        "GLM-4.7-Flash, FP8": Published(of_family("glm4_moe_lite"), BLOCKS, is_projection),
        "Hy3, FP8": Published(of_family("hy_v3"), BLOCKS, is_projection),
        # Without experts.
        "Qwen3, FP8": Published(of_family("qwen3"), BLOCKS, is_projection),
        "Llama, NVFP4 of ModelOpt": Published(
            of_family("llama-gqa"), MODELOPT, is_projection, file="hf_quant_config.json"
        ),
        "Llama, NVFP4": Published(of_family("llama-gqa"), NVFP4, is_projection),
        "Ministral 3, static FP8": Published(
            of_family("mistral3-ministral3"),
            float8_static(),
            is_of_text,
            {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector"]},
        ),
        "Llama, FP8 of ModelOpt": Published(
            of_family("llama-gqa"), modelopt_float8(), is_projection
        ),
        "Qwen3-MoE, MXFP8": Published(of_family("qwen3_moe", **EXPERTS), mxfp8(), is_projection),
        "Llama, MXFP4": Published(of_family("llama-gqa"), four_bits.mxfp4(), is_projection),
        # Other layers.
        **{
            f"{name}, FP8": Published(of_family(name), BLOCKS, is_projection)
            for name in ("lfm2", "lfm2_moe", "bamba", "granite4-experts", "granite4-mamba")
        },
        **{
            f"{name}, INT4": Published(of_family(name), INT4, is_projection)
            for name in ("cohere2", "apertus", "ministral3", "bamba", "lfm2", "qwen3_5_text")
        },
    }
)


def publish(name: str, folder: Path) -> Path:
    """The checkpoint of this name in PUBLISHED, or ``gpt-oss``."""
    if name == "gpt-oss":
        made, _ = four_bits.write_gpt_oss(save_family(folder / "source", "gpt_oss"), folder)
        save_byte_tokenizer(made)
        return made
    published, rng = PUBLISHED[name], np.random.default_rng(0)
    source, config = contents(published.source(folder / "source"))
    tensors: Tensors = {}
    for tensor, weight in source.items():
        if published.quantizes(tensor) and weight.ndim == 2:  # not tensors of all experts
            parts, _ = published.form_of(tensor).write(weight.astype(np.float32), rng)
            tensors |= {f"{tensor.removesuffix('weight')}{kind}": x for kind, x in parts.items()}
        else:
            is_kept = tensor.endswith(IN_FLOAT32) or weight.dtype.kind != "f"
            tensors[tensor] = weight if is_kept else weight.astype(ml_dtypes.bfloat16)
    config["quantization_config"] = published.form.config | published.fields
    if published.wrapped is not None:
        tensors, config = published.wrapped((tensors, config))
    if published.file != "config.json":
        said = config.pop("quantization_config")
        own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": said["quant_algo"]}}
        write_json(folder / "published" / published.file, own)
    write_json(folder / "published" / "config.json", config)
    return write_shards(folder / "published", tensors)


def write_shards(folder: Path, tensors: Tensors, count: int = 2) -> Path:
    """Files of about as many tensors each, with an index, and a tokenizer."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = names[i::count]
        weight_map |= dict.fromkeys(part, file)
        save_file({name: of_torch(tensors[name]) for name in part}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    save_byte_tokenizer(folder)
    return folder


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
