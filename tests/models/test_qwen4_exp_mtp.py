"""The MTP layer of Qwen3.8-Flash-Next: its logits against transformers' blocks, and what is
refused."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from jaxspec.checkpoints.mtp import MtpChoice, has_mtp_layers, load_mtp_head
from jaxspec.config.mixers import IndexedAttentionConfig
from jaxspec.config.mtp import AFTER
from jaxspec.models import decoder
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.heads import mtp_head_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.draft_steps import assert_steps_have_logits
from tests.helpers.parity import load
from tests.models.test_qwen4_exp import published


class TorchMtp(torch.nn.Module):
    """An MTP layer of transformers' blocks, with the names of published files."""

    def __init__(self, config: Any):
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types, config.ple_layer_ids = ["indexed_attention"], []
        config._attn_implementation, size, self.config = "eager", config.hidden_size, config
        eps = config.rms_norm_eps
        self.pre_fc_norm_embedding = theirs.Qwen4ExpTextRMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = theirs.Qwen4ExpTextRMSNorm(config.hc_count * size, eps=eps)
        self.fc_embedding, self.fc_hidden = (
            torch.nn.Linear(size, size, bias=False) for _ in range(2)
        )
        self.layers = torch.nn.ModuleList([theirs.Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = theirs.Qwen4ExpTextGatedResidual(config, use_combine=False)

    def forward(
        self, embedded: torch.Tensor, streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the LM head reads, and the streams side by side that the next step reads."""
        batch, length, size = embedded.shape
        of_token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        each = self.pre_fc_norm_hidden(streams).reshape(batch, length, -1, size)
        x = (of_token[:, :, None] + self.fc_hidden(each)).reshape(streams.shape)
        ids = torch.arange(length).expand(3, batch, length)
        angles = theirs.Qwen4ExpTextRotaryEmbedding(self.config)(x, ids)
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        mask = mask.expand(batch, 1, length, length)
        x = self.layers[0](x, position_embeddings=angles, attention_mask=mask)
        return self.hyper_connection_mixer(x), x

    def published(self) -> dict[str, np.ndarray]:
        """Its tensors, by published names."""
        return {f"mtp.{name}": x.numpy() for name, x in self.state_dict().items()}


@pytest.mark.slow
def test_an_mtp_layer_has_the_logits_of_transformers_blocks(checkpoint, tmp_path: Path):
    """Of two draft steps: the second one reads the streams of the first."""
    path, tokens, _ = checkpoint("qwen4_exp")
    assert not has_mtp_layers(path, load_model_config(path))
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    mtp, streams = TorchMtp(model.config).eval(), list[torch.Tensor]()
    model.model.layers[-1].register_forward_hook(lambda module, given, out: streams.append(out))
    with torch.no_grad():
        for parameter in mtp.parameters():
            parameter.copy_((0.3 if parameter.ndim == 1 else 0.15) * torch.randn_like(parameter))
        ids = torch.from_numpy(tokens)
        model(ids)
        embedded = model.get_input_embeddings()(ids)
        first, recycled = mtp(embedded[:, 1:], streams[0][:, :-1])
        second, _ = mtp(embedded[:, 2:], recycled[:, :-1])
        expected = [model.lm_head(x).numpy() for x in (first, second)]
    stored = load_file(path / "model.safetensors") | mtp.published()
    assert {"mtp.fc_hidden.weight", "mtp.layers.0.mlp.experts.gate_up_proj"} <= stored.keys()
    assert "mtp.hyper_connection_mixer.input_mix_weight_up.weight" in stored
    save_tensors(tmp_path, stored, json.loads((path / "config.json").read_text()))

    target, config = load(tmp_path), load_model_config(tmp_path)
    assert has_mtp_layers(tmp_path, config)
    head = load_mtp_head(tmp_path, config, jnp.dtype(jnp.float32))
    assert head.feature_size(target) == 3 * 64
    assert_steps_have_logits(target, [head, head], tokens, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mtp": None, "mtp_num_hidden_layers": -1},
            "mtp_num_hidden_layers must be a number of",
        ),
        ({"mtp_num_hidden_layers": 2}, "mtp has 1 layers, and mtp_num_hidden_layers is 2"),
        ({"mtp": 1}, "mtp must be an object, got 1"),
        ({"mtp": {"x": 1}}, "mtp: unknown key 'x' (= 1)"),
        ({"mtp": {"hybrid": False}}, "mtp: hybrid = False is not supported, only True"),
        ({"mtp": {"rope_theta": 5.0}}, "mtp: rope_theta 5.0 is not that of the model"),
        (
            {"mtp": {"layer_types": ["linear_attention"]}},
            "mtp: layer_types must be 1 times full_attention, got ['linear_attention']",
        ),
    ],
)
def test_mtp_layers_that_are_not_supported_are_named(change: dict[str, Any], message: str):
    raw = published()
    raw["text_config"] |= change
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_model_config(raw)


def test_an_mtp_layer_has_attention_and_reads_the_streams_before_they_are_folded():
    config = parse_model_config(published())
    assert config.mtp is not None
    head = mtp_head_config(config, config.mtp)
    [layer] = head.model.layers
    assert isinstance(layer.mixer, IndexedAttentionConfig) and layer.ngrams is None
    assert layer.streams == config.layers[0].streams
    assert head.capture == (decoder.STREAMS,) and MtpChoice().over(config.mtp).num_layers == 1
    several = dataclasses.replace(config.mtp, num_layers=2)
    with pytest.raises(ValueError, match="that share a projection only the first can draft"):
        MtpChoice(count=2).over(several)
    with pytest.raises(ValueError, match="after is not possible, choose the drafter mtp"):
        mtp_head_config(config, dataclasses.replace(config.mtp, states=AFTER))
