"""MTP layers of MiniMax M3: their logits against transformers' blocks, and tensors' names."""

import copy
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs

from jaxspec.checkpoints.mtp import MtpChoice, has_mtp_layers, load_mtp_head, load_mtp_heads
from jaxspec.config.mixers import BlockSparseConfig
from jaxspec.config.mtp import AFTER_BEFORE
from jaxspec.models.from_config.model import load_model_config, parse_model_config, with_mtp_layer
from tests.helpers.checkpoints import save_tensors
from tests.helpers.draft_steps import assert_steps_have_logits
from tests.helpers.marks import LEFT_OUT
from tests.helpers.minimax_m3_checkpoints import SPARSE
from tests.helpers.parity import load
from tests.models.test_minimax_m3 import published

FLOAT32 = jnp.dtype("float32")


class TorchMtp(torch.nn.Module):
    """An MTP layer of transformers' blocks."""

    def __init__(self, config: Any):
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types, config.mlp_layer_types = [SPARSE], ["sparse"]
        config._attn_implementation, size, self.config = "eager", config.hidden_size, config

        def norm() -> Any:
            return theirs.MiniMaxM3VLRMSNorm(size, config.rms_norm_eps)

        self.enorm, self.hnorm, self.final_layernorm = norm(), norm(), norm()
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.transformer_layer = theirs.MiniMaxM3VLDecoderLayer(config, 0)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the LM head reads, and the hidden states that the next step reads."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        ids = torch.arange(x.shape[1])[None]
        angles = theirs.MiniMaxM3VLRotaryEmbedding(self.config)(x, ids)
        mask = torch.full((x.shape[1],) * 2, torch.finfo(x.dtype).min).triu(1)[None, None]
        given: dict[str, Any] = {"position_embeddings": angles, "position_ids": ids}
        x = self.transformer_layer(x, attention_mask=mask, **given)
        return self.final_layernorm(x), x

    def published(self, prefix: str) -> dict[str, np.ndarray]:
        """Its tensors, by published names."""
        table = {".self_attn.indexer.": ".self_attn.index_", ".mlp.": ".block_sparse_moe."}
        table |= {"gate.e_score": "e_score"}
        stored = dict[str, np.ndarray]()
        for name, x in self.state_dict().items():
            for old, new in table.items():
                name = name.replace(old, new)
            parts = {
                "experts.gate_up_proj": ("experts.{}.w1.weight", "experts.{}.w3.weight"),
                "experts.down_proj": ("experts.{}.w2.weight",),
                "shared_experts.gate_up_proj.weight": (
                    *("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
                ),
            }
            block, moe, own = name.partition(".block_sparse_moe.")
            if own not in parts:
                stored[f"{prefix}{name}"] = x.numpy()
                continue
            for index, matrices in enumerate(x if x.ndim == 3 else x[None]):
                for part, matrix in zip(parts[own], matrices.chunk(len(parts[own])), strict=True):
                    whole = f"{prefix}{block}{moe}{part.format(index)}"
                    stored[whole] = np.ascontiguousarray(matrix)
        return stored


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_mtp_layers_have_the_logits_of_transformers_blocks(checkpoint, tmp_path: Path):
    """Of two draft steps, each with a layer of its own: the second one reads the states of the
    first before their norm."""
    path, tokens, _ = checkpoint("minimax_m3")
    kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    config = model.config.text_config
    layers = [TorchMtp(config) for _ in range(2)]
    with torch.no_grad():
        for layer in layers:
            for parameter in (*layer.parameters(), *layer.buffers()):
                noise = torch.randn_like(parameter)
                parameter.copy_(0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
        ids = torch.from_numpy(tokens)
        hidden = model.model(ids).last_hidden_state  # after the final norm
        embedded = model.get_input_embeddings()(ids)
        first, recycled = layers[0](embedded[:, 1:], hidden[:, :-1])
        second, _ = layers[1](embedded[:, 2:], recycled[:, :-1])
        expected = [model.lm_head(x).numpy() for x in (first, second)]
    stored, raw = (
        load_file(path / "model.safetensors"),
        json.loads((path / "config.json").read_text()),
    )
    for index, layer in enumerate(layers):
        stored |= layer.published(f"language_model.model.mtp.layers.{index}.")
    named = "language_model.model.mtp.layers.1.transformer_layer."
    for name in ("self_attn.index_q_proj.weight", "block_sparse_moe.e_score_correction_bias"):
        assert f"{named}{name}" in stored
    raw["text_config"]["num_mtp_modules"] = 2
    save_tensors(tmp_path, stored, raw)

    assert not has_mtp_layers(path, load_model_config(path))
    target, model_config = load(tmp_path), load_model_config(tmp_path)
    assert has_mtp_layers(tmp_path, model_config)
    heads = load_mtp_heads(tmp_path, model_config, FLOAT32)
    assert_steps_have_logits(target, heads, tokens, expected)


def test_mtp_layers_choose_blocks_and_have_experts():
    config = parse_model_config(published())
    assert config.mtp is not None
    assert (config.mtp.num_layers, config.mtp.states) == (7, AFTER_BEFORE)
    assert all(isinstance(layer.mixer, BlockSparseConfig) for layer in config.mtp.layers)
    assert {layer.mlp for layer in config.mtp.layers} == {config.layers[-1].mlp}
    assert MtpChoice(count=1).name(config.mtp) == "mtp:after-before:1"
    one = parse_model_config(with_mtp_layer(published()))
    assert one.mtp is not None and one.mtp.num_layers == 1


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_files_without_the_layers_that_their_config_counts_are_named(checkpoint, tmp_path: Path):
    """Published configs count layers that published files lack."""
    path, _, _ = checkpoint("minimax_m3")
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["num_mtp_modules"] = 7
    save_tensors(tmp_path, load_file(path / "model.safetensors"), raw)
    config = load_model_config(tmp_path)
    assert config.mtp is not None and not has_mtp_layers(tmp_path, config)
    with pytest.raises(ValueError, match=r"has no tensors model\.mtp\.layers\.0"):
        load_mtp_head(tmp_path, config, FLOAT32)
