"""transformers' MTP layers for a checkpoint of tests/checkpoints.py."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file
from transformers.modeling_layers import MtpModel

from tests.checkpoints import MTP_NAMES, mtp_prefix


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
