"""Small random EAGLE-3.1 heads, with the tensor names and config.json of published ones."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

from jaxspec.models.from_config.model import read_json
from tests.helpers.checkpoints import near_one, normal, save_tensors, tiny_eagle3_head

# flat: as TorchSpec and SpecForge write it, for SGLang: the layers are named in eagle_config, by
#   the layer whose output is taken, which is one less than jaxspec counts.
# nvidia: as ModelOpt's: norm_before_fc is in eagle_config, the layers count as in jaxspec.
# speculators: as vllm-project/speculators writes it: the layer's config is a config inside.
Style = Literal["flat", "nvidia", "speculators"]


def tiny_eagle31_head(
    directory: str | Path,
    target_dir: str | Path,
    seed: int = 0,
    *,
    style: Style = "flat",
    capture: tuple[int, ...] = (2, 4, 5),
    draft_vocab: int | None = 96,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    qkv_bias: bool = False,
    has_embeddings: bool = False,
    has_lm_head: bool = True,
    **overrides: Any,
) -> Path:
    """A head for the target in ``target_dir``; without a flag set, plain EAGLE-3.

    Args:
      capture: the target's hidden states that it reads, as jaxspec counts them: after i layers.
        ``flat`` heads must read the state after layer 2, or their ids could be taken for counts.
      draft_vocab: None: the target's whole vocabulary, without d2t.
      has_embeddings: it has embeddings of its own. A head of another hidden size than the target's
        (among ``overrides``) needs them.
      has_lm_head: it has an LM head of its own. One with a reduced vocabulary needs it.
      overrides: config values of the layer.
    """
    if style == "flat" and min(capture) != 2:
        raise ValueError(f"a flat head must read the state after layer 2, not only {capture}")
    target = read_json(Path(target_dir) / "config.json")
    vocab, target_hidden = target["vocab_size"], target["hidden_size"]
    tiny_eagle3_head(directory, target_dir, seed, draft_vocab or vocab, **overrides)
    tensors = load_file(Path(directory) / "model.safetensors")
    config = read_json(Path(directory) / "config.json")
    rng, hidden = np.random.default_rng([seed, 31]), config["hidden_size"]

    tensors["fc.weight"] = normal(rng, hidden, target_hidden * len(capture))
    if norm_before_fc:
        tensors["input_norm.weight"] = near_one(rng, target_hidden * len(capture))
    if fc_norm:
        for i in range(len(capture)):
            tensors[f"fc_norm.{i}.weight"] = near_one(rng, target_hidden)
    if qkv_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = f"midlayer.self_attn.{name}"
            tensors[f"{projection}.bias"] = normal(rng, len(tensors[f"{projection}.weight"]))
        config["qkv_bias"] = True
    if has_embeddings:
        tensors["embed_tokens.weight"] = normal(rng, vocab, hidden)
    if draft_vocab is None:
        del tensors["d2t"], tensors["t2d"]
    if not has_lm_head:
        del tensors["lm_head.weight"]
        config["draft_vocab_size"] = None

    flags: dict[str, Any] = {
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_output": norm_output,
        "norm_before_residual": norm_before_residual,
    }
    if style == "speculators":
        config = _speculators_config(config, flags, capture)
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    else:
        config |= _flat_fields(style, flags, capture, target_hidden)
    return save_tensors(directory, tensors, config)


def _flat_fields(
    style: Style, flags: dict[str, Any], capture: tuple[int, ...], target_hidden: int
) -> dict[str, Any]:
    present: dict[str, Any] = {name: True for name, value in flags.items() if value}
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if style == "nvidia":
        if present.pop("norm_before_fc", False):
            nested["norm_before_fc"] = True
        present["eagle_aux_hidden_state_layer_ids"] = list(capture)
    else:
        nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in capture]
    sizes = {"target_hidden_size": target_hidden, "num_aux_hidden_states": len(capture)}
    return present | sizes | {"eagle_config": nested}


def _speculators_config(
    config: dict[str, Any], flags: dict[str, Any], capture: tuple[int, ...]
) -> dict[str, Any]:
    """Every flag is written out. ``config`` becomes that of the layer."""
    draft_vocab_size = config.pop("draft_vocab_size")
    del config["architectures"]
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return flags | {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": draft_vocab_size,
        "dtype": config.pop("torch_dtype"),
        "eagle_aux_hidden_state_layer_ids": list(capture),
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"accept_tolerance": 0.0}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.8.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": config,
    }
