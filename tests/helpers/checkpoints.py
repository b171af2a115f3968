"""Small random checkpoints in the formats found on the Hugging Face hub, made with transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.helpers.small_tokenizers import one_token_a_byte

DATA = Path(__file__).parents[1] / "data"

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}


def tiny_llama(directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """A Llama checkpoint of transformers' making; ``overrides`` go to its config."""
    return _tiny(directory, transformers.LlamaConfig, seed, {"rms_norm_eps": 1e-5} | overrides)


def tiny_byte_llama(directory: str | Path, **overrides: Any) -> Path:
    """A Llama of two layers whose tokens are bytes."""
    path = tiny_llama(directory, vocab_size=257, num_hidden_layers=2, **overrides)
    save_byte_tokenizer(path)
    return path


def tiny_qwen2(directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    return _tiny(directory, transformers.Qwen2Config, seed, overrides)


def tiny_qwen3(directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    return _tiny(directory, transformers.Qwen3Config, seed, {"head_dim": 32} | overrides)


def tiny_mistral(directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    return _tiny(directory, transformers.MistralConfig, seed, overrides)


def _tiny(directory: str | Path, kind: Any, seed: int, overrides: dict[str, Any]) -> Path:
    return save_random_model(directory, kind(**TINY | overrides), seed)


def save_random_model(
    directory: str | Path,
    config: transformers.PretrainedConfig,
    seed: int = 0,
    max_shard_size: str = "1GB",
) -> Path:
    """Save a model of random weights. Norms and biases are random too, unlike a fresh model's, and
    so are buffers that routers add to their scores, or layers multiply the residual stream by."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = _class_of(config).from_config(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_norm = tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter)
            if is_norm or name.endswith(("bias", "layer_scalar")):
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return Path(directory)


def _class_of(config: transformers.PretrainedConfig) -> Any:
    """Of models of text, or of text and images."""
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def save_byte_tokenizer(directory: str | Path) -> None:
    """One token a byte, and an end token."""
    tokenizer = one_token_a_byte({"<end>": 256})
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(directory)


def hf_logits(directory: str | Path, tokens: np.ndarray) -> np.ndarray:
    """transformers' float32 logits: int [B, T] -> [B, T, V]."""
    transformers.utils.logging.disable_progress_bar()
    kind = _class_of(transformers.AutoConfig.from_pretrained(directory))
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def tiny_eagle3_head(
    directory: str | Path,
    target_dir: str | Path,
    seed: int = 0,
    draft_vocab: int = 96,
    **overrides: Any,
) -> Path:
    """An EAGLE-3 head in the official layout for the target in ``target_dir``."""
    rng, config = _head_basics(target_dir, seed, overrides)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "fc.weight": normal(rng, hidden, 3 * hidden),
        "norm.weight": near_one(rng, hidden),
        "lm_head.weight": normal(rng, draft_vocab, hidden),
        "midlayer.hidden_norm.weight": near_one(rng, hidden),
        "midlayer.input_layernorm.weight": near_one(rng, hidden),
    } | _layer_tensors(rng, config, "midlayer", input_size=2 * hidden)
    ids = np.sort(rng.permutation(vocab)[:draft_vocab])
    tensors["d2t"] = ids - np.arange(draft_vocab)
    tensors["t2d"] = np.isin(np.arange(vocab), ids)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
    return save_tensors(directory, tensors, config)


def tiny_eagle1_head(
    directory: str | Path,
    target_dir: str | Path,
    seed: int = 0,
    bias: bool = True,
    **overrides: Any,
) -> Path:
    """An EAGLE-1 head in the official layout for the target in ``target_dir``."""
    rng, config = _head_basics(target_dir, seed, overrides)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "embed_tokens.weight": normal(rng, vocab, hidden),
        "fc.weight": normal(rng, hidden, 2 * hidden),
    } | _layer_tensors(rng, config, "layers.0", input_size=hidden)
    if bias:
        tensors["fc.bias"] = normal(rng, hidden)
    return save_tensors(directory, tensors, config | {"bias": bias})


MTP_NAMES = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "ernie": ("emb_norm.0", "hidden_norm.0", "linear_proj.0", None),  # the model's norm
    "hy3": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


def add_mtp_layer(
    directory: str | Path, layout: str, seed: int = 0, count: int = 1, noise: float = 0.3
) -> Path:
    """Give a checkpoint random MTP layers, named as in those of DeepSeek-V3, MiMo or Qwen (of which
    one only). Its config then says that it has them. ``noise`` is added to the model's weights."""
    directory, rng = Path(directory), np.random.default_rng(seed)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    embed_norm, hidden_norm, fc, norm = MTP_NAMES[layout]
    last, of_qwen = f"model.layers.{layers - 1}.", config["model_type"].startswith("qwen3")
    last = "model.layers.0." if layout == "ernie" else last  # which is dense
    for index in range(count):
        own = mtp_prefix(layout, layers, index)
        block = {"qwen": f"{own}layers.0.", "ernie": f"{own}block.0."}.get(layout, own)
        for name in [name for name in tensors if name.startswith(last)]:  # like the last layer
            like = tensors[name]
            values = rng.permutation(like) + noise * rng.standard_normal(like.shape)
            tensors[name.replace(last, block)] = values.astype(np.float32)
        for name in filter(None, (embed_norm, hidden_norm, norm)):
            tensors[f"{own}{name}.weight"] = near_one(rng, hidden) - of_qwen
        tensors[f"{own}{fc}.weight"] = normal(rng, hidden, 2 * hidden)
        if layout == "deepseek":
            tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        if layout == "hy3":
            tensors[f"{own}shared_head.weight"] = tensors["lm_head.weight"]
    key = "mtp_num_hidden_layers" if of_qwen else "num_nextn_predict_layers"
    config[key] = count
    if layout == "qwen":
        return save_tensors(directory, tensors, config)
    if layout == "mimo":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        config |= {"attention_bias": True, "auto_map": {"AutoConfig": "x.MiMoConfig"}}
    return save_tensors(directory, tensors, config)


def mtp_prefix(layout: str, layers: int, index: int = 0) -> str:
    """What the tensors of MTP layer ``index`` of a model of so many layers are called."""
    if layout in ("qwen", "ernie"):
        return {"qwen": "mtp.", "ernie": "model.mtp_"}[layout]
    return f"model.mtp_layers.{index}." if layout == "mimo" else f"model.layers.{layers + index}."


def within_images(directory: str | Path, model_type: str, architecture: str) -> Path:
    """Make a text model's checkpoint the text part of a model of text and images, of which no other
    tensors are there."""
    directory = Path(directory)
    text = json.loads((directory / "config.json").read_text())
    named = load_file(directory / "model.safetensors").items()
    tensors = {re.sub(r"^model\.", "model.language_model.", name): one for name, one in named}
    config = {"model_type": model_type, "architectures": [architecture], "text_config": text}
    return save_tensors(directory, tensors, config)


def save_tensors(
    directory: str | Path, tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> Path:
    """Write model.safetensors and config.json as they are given."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def changed_copy(
    directory: Path, to: Path, config: dict[str, Any] | None = None, **tensors: Any
) -> Path:
    """A copy of a checkpoint with other config values and tensors (None removes one)."""
    files = load_file(directory / "model.safetensors") | tensors
    kept = {name: value for name, value in files.items() if value is not None}
    raw = json.loads((directory / "config.json").read_text())
    return save_tensors(to, kept, raw | (config or {}))


def _head_basics(
    target_dir: str | Path, seed: int, overrides: dict[str, Any]
) -> tuple[np.random.Generator, dict[str, Any]]:
    target = json.loads((Path(target_dir) / "config.json").read_text())
    heads = target["num_attention_heads"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    return np.random.default_rng(seed), config | overrides


def _layer_tensors(
    rng: np.random.Generator, config: dict[str, Any], prefix: str, input_size: int
) -> dict[str, np.ndarray]:
    hidden, ff = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{prefix}.post_attention_layernorm.weight": near_one(rng, hidden),
        f"{prefix}.self_attn.q_proj.weight": normal(rng, queries, input_size),
        f"{prefix}.self_attn.k_proj.weight": normal(rng, keys, input_size),
        f"{prefix}.self_attn.v_proj.weight": normal(rng, keys, input_size),
        f"{prefix}.self_attn.o_proj.weight": normal(rng, hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": normal(rng, ff, hidden),
        f"{prefix}.mlp.up_proj.weight": normal(rng, ff, hidden),
        f"{prefix}.mlp.down_proj.weight": normal(rng, hidden, ff),
    }


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (0.15 * rng.standard_normal(shape)).astype(np.float32)


def near_one(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)
