"""transformers' MTP layers for a checkpoint of tests/helpers/checkpoints.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers.modeling_layers import MtpModel

from tests.helpers.checkpoints import MTP_NAMES, mtp_prefix


def torch_mtp(path: Path, layout: str, kind: Any, count: int = 1) -> tuple[Any, MtpModel]:
    """The model in float32, and its ``count`` MTP layers; ``kind`` is the config's class."""
    config = kind(**json.loads((path / "config.json").read_text()))
    config.num_mtp_layers = count
    if layout == "mimo":
        config.mtp_layer_types = ["full_attention"] * count
    config.mtp_hidden_states_first = layout == "mimo"
    stored = {
        name: torch.from_numpy(one) for name, one in load_file(path / "model.safetensors").items()
    }
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(stored, strict=False)
    mtp, state = MtpModel(model, count), {}
    names = dict(zip(MTP_NAMES[layout], ("enorm", "hnorm", "eh_proj", "post_norm"), strict=True))
    for index in range(count):
        own = mtp_prefix(layout, config.num_hidden_layers, index)
        for name, tensor in stored.items():
            if name.startswith(own) and "embed_tokens" not in name:
                rest, _, kind_of = name.removeprefix(own).rpartition(".")
                state[f"layers.{index}.{names.get(rest, f'mtp_block.{rest}')}.{kind_of}"] = tensor
    missing, surplus = mtp.load_state_dict(state, strict=False)
    assert not surplus and not [name for name in missing if name.startswith("layers.")]
    return model, mtp


def torch_mtp_of_family(path: Path) -> tuple[Any, MtpModel]:
    """The model in float32 and its MTP layers, both as transformers reads the family's tensors.

    The names of MTP layers that transformers looks for are those of published sizes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    layers, count = model.config.num_hidden_layers, model.config.num_mtp_layers
    own = [rf"model\.layers\.{layers + index}\." for index in range(count)]
    model._keys_to_ignore_on_load_unexpected = own
    return model, MtpModel.from_pretrained(model)


def draft_log_probs(
    model: Any,
    mtp: MtpModel,
    text: list[int],
    steps: int,
    *,
    target_normed: bool = True,
    draft_normed: bool = True,
) -> np.ndarray:
    """Log-probabilities [steps, V] of the last ``steps`` tokens of a text, which were drafted.

    Step j runs layer j over the outputs of the one before; a single layer runs each step, over the
    target's hidden states and, behind them, its own outputs. The states are those after the
    target's norm, or before it, and after the layer's own, or before it."""
    layers: Any = mtp.layers
    before: list[torch.Tensor] = []  # what went into the latest norm
    hooks = [
        norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        for norm in (model.model.norm, *(layer.post_norm for layer in layers))
    ]
    ids = torch.tensor([text])
    context = ids[:, : -steps - 1]
    with torch.no_grad():
        hidden, found = model(context, output_hidden_states=True).hidden_states[-1], []
        hidden = hidden if target_normed else before[-1]
        for step in range(steps):
            first = step if len(layers) > 1 else 0  # where the hidden states begin
            positions = torch.arange(first, first + hidden.shape[1])[None]
            read = ids[:, 1 + first : 1 + first + hidden.shape[1]]
            layer = min(step, len(layers) - 1)
            out = mtp.forward_layer(layer, hidden, positions, None, input_ids=read)
            found.append(torch.log_softmax(model.lm_head(out[0, -1]), dim=-1))
            out = out if draft_normed else before[-1]
            hidden = out if len(layers) > 1 else torch.cat([hidden, out[:, -1:]], dim=1)
    for hook in hooks:
        hook.remove()
    return torch.stack(found).numpy()
