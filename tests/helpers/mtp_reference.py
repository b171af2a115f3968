"""transformers' MTP layers for a checkpoint of tests/helpers/checkpoints.py."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers.modeling_layers import MtpModel

from jaxspec.config.mtp import MtpStates
from tests.helpers.checkpoints import MTP_NAMES, mtp_prefix
from tests.helpers.hybrid_checkpoints import with_fused_experts

# Of MTP layers: tensors of the model.
COPIES = ("embed_tokens.weight", "shared_head.weight")
# By model_type: names of tensors in files, and what transformers' modules call them.
RENAMED = {
    "ernie4_5_moe": {".mlp.moe_statics.": ".mlp.gate.moe_statics."},
    "hy_v3": {
        ".mlp.expert_bias": ".mlp.e_score_correction_bias",
        ".router.gate.": ".gate.",
        ".shared_mlp.": ".shared_experts.",
    },
    "exaone_moe": {".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
}


def torch_mtp(path: Path, layout: str, kind: Any, count: int = 1) -> tuple[Any, MtpModel]:
    """The model in float32, and its ``count`` MTP layers; ``kind`` is the config's class."""
    config = kind(**json.loads((path / "config.json").read_text()))
    config.num_mtp_layers = count
    if layout != "deepseek" or getattr(config, "layer_types", None):
        *_, last = getattr(config, "layer_types", None) or [None]
        kind = "sliding_attention" if last == "sliding_attention" else "full_attention"
        config.mtp_layer_types = [kind] * count
    if getattr(config, "mlp_layer_types", None):  # as the last layer
        config.mtp_mlp_layer_types = config.mlp_layer_types[-1:] * count
    config.mtp_hidden_states_first = layout == "mimo"
    stored = {
        name: torch.from_numpy(one)
        for name, one in with_fused_experts(load_file(path / "model.safetensors")).items()
    }
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for old, new in RENAMED.get(config.model_type, {}).items():
        stored = {name.replace(old, new): one for name, one in stored.items()}
    model.load_state_dict(stored, strict=False)
    mtp, state = MtpModel(model, count), {}
    names = dict(zip(MTP_NAMES[layout], ("enorm", "hnorm", "eh_proj", "post_norm"), strict=True))
    for index in range(count):
        own = mtp_prefix(layout, config.num_hidden_layers, index)
        for name, tensor in stored.items():
            if name.startswith(own) and not name.endswith(COPIES):
                rest, _, kind_of = name.removeprefix(own).rpartition(".")
                block = f"mtp_block.{re.sub(r'^(layers|block)[.]0[.]', '', rest)}"
                state[f"layers.{index}.{names.get(rest, block)}.{kind_of}"] = tensor
        if layout == "ernie":
            state[f"layers.{index}.post_norm.weight"] = stored["model.norm.weight"]
    missing, surplus = mtp.load_state_dict(state, strict=False)
    assert not surplus and not [name for name in missing if name.startswith("layers.")]
    return model, mtp


def target_states(model: Any, ids: torch.Tensor, *, normed: bool) -> torch.Tensor:
    """The model's hidden states after its final norm, or before it: [B, T, H]."""
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    with torch.no_grad():
        after = model.model(ids).last_hidden_state
    hook.remove()
    return after if normed else before[0]


def draft_log_probs(
    model: Any, mtp: MtpModel, text: list[int], steps: int, states: MtpStates
) -> np.ndarray:
    """Log-probabilities [steps, V] of the last ``steps`` tokens of a text, which were drafted.

    Step j runs layer j over the outputs of the one before; a single layer runs each step, over the
    target's hidden states and, behind them, its own outputs."""
    layers: Any = mtp.layers
    before: list[torch.Tensor] = []  # what went into the latest norm
    hooks = [
        layer.post_norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        for layer in layers
    ]
    ids, found = torch.tensor([text]), []
    hidden = target_states(model, ids[:, : -steps - 1], normed=states.target_normed)
    with torch.no_grad():
        for step in range(steps):
            first = step if len(layers) > 1 else 0  # where the hidden states begin
            positions = torch.arange(first, first + hidden.shape[1])[None]
            read = ids[:, 1 + first : 1 + first + hidden.shape[1]]
            layer = min(step, len(layers) - 1)
            out = mtp.forward_layer(layer, hidden, positions, None, input_ids=read)
            found.append(torch.log_softmax(model.lm_head(out[0, -1]), dim=-1))
            out = out if states.draft_normed else before[-1]
            hidden = out if len(layers) > 1 else torch.cat([hidden, out[:, -1:]], dim=1)
    for hook in hooks:
        hook.remove()
    return torch.stack(found).numpy()
