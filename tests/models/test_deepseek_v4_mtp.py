"""The MTP layer of DeepSeek-V4: its logits against transformers' blocks, and what is refused."""

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
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from jaxspec.checkpoints.mtp import MtpChoice, has_mtp_layers, load_mtp_head
from jaxspec.config.entries import EntryAttentionConfig
from jaxspec.config.mtp import AFTER
from jaxspec.models import decoder
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.heads import mtp_head_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.deepseek_v4_checkpoints import WINDOW, as_published
from tests.helpers.draft_steps import assert_steps_have_logits
from tests.helpers.parity import load
from tests.models.test_deepseek_v4 import published


class TorchMtp(torch.nn.Module):
    """An MTP layer of transformers' blocks, with the names of published files."""

    def __init__(self, config: Any):
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types, config.mlp_layer_types = [WINDOW], ["moe"]
        config._attn_implementation, size, self.config = "eager", config.hidden_size, config

        def norm() -> Any:
            return theirs.DeepseekV4RMSNorm(size, config.rms_norm_eps)

        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.e_proj, self.h_proj = (torch.nn.Linear(size, size, bias=False) for _ in range(2))
        self.block = theirs.DeepseekV4DecoderLayer(config, 0)
        self.hc_head = theirs.DeepseekV4HyperHead(config)

    def forward(
        self, embedded: torch.Tensor, streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the LM head reads, and the streams that the next step reads."""
        x = self.e_proj(self.enorm(embedded))[:, :, None] + self.h_proj(self.hnorm(streams))
        ids = torch.arange(x.shape[1])[None]
        rotation = theirs.DeepseekV4RotaryEmbedding(self.config)
        angles = {kind: rotation(x, ids, kind) for kind in ("main", "compress")}
        behind = ids[0][:, None] - ids
        hidden = (behind < 0) | (behind >= self.config.sliding_window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        given: dict[str, Any] = {"position_embeddings": angles, "position_ids": ids}
        x = self.block(x, attention_mask=mask[None, None], **given)
        return self.norm(self.hc_head(x)), x

    def published(self, prefix: str) -> dict[str, np.ndarray]:
        """Its tensors, by published names."""
        table = {"block.self_attn.": "attn.", "block.mlp.": "ffn.", "sinks": "attn_sink"}
        table |= {"_a_proj": "_a", "_b_proj": "_b", "q_a_norm": "q_norm", "o_a": "wo_a"}
        table |= {"o_b": "wo_b", "q_a": "wq_a", "q_b": "wq_b", "kv_proj": "wkv"}
        table |= {
            "block.attn_hc.": "hc_attn_",
            "block.ffn_hc.": "hc_ffn_",
            "hc_head.hc_": "hc_head_",
        }
        table |= {"e_score_correction_bias": "bias", "block.input_layernorm": "attn_norm"}
        table |= {"block.post_attention_layernorm": "ffn_norm", "gate_proj": "w1", "up_proj": "w3"}
        stored = dict[str, np.ndarray]()
        for name, x in self.state_dict().items():
            for old, new in (table | {"down_proj": "w2"}).items():
                name = name.replace(old, new)
            parts = {"ffn.experts.gate_w3": ("w1", "w3"), "ffn.experts.w2": ("w2",)}.get(name)
            if parts is None:
                stored[f"{prefix}{name}"] = x.numpy()
                continue
            for index, matrices in enumerate(x):  # published one by one
                for kind, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                    expert = f"{prefix}ffn.experts.{index}.{kind}.weight"
                    stored[expert] = np.ascontiguousarray(matrix)
        return stored


@pytest.mark.slow
def test_an_mtp_layer_has_the_logits_of_transformers_blocks(checkpoint, tmp_path: Path):
    """Of two draft steps: the second one reads the streams of the first."""
    path, tokens, _ = checkpoint("deepseek_v4")
    assert not has_mtp_layers(path, load_model_config(path))
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    mtp, streams = TorchMtp(model.config), list[torch.Tensor]()
    model.model.layers[-1].register_forward_hook(lambda module, given, out: streams.append(out))
    with torch.no_grad():
        for parameter in (*mtp.parameters(), *mtp.buffers()):
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
        ids = torch.from_numpy(tokens)
        model(ids)
        embedded = model.get_input_embeddings()(ids)
        first, recycled = mtp(embedded[:, 1:], streams[0][:, :-1])
        second, _ = mtp(embedded[:, 2:], recycled[:, :-1])
        expected = [model.lm_head(x).numpy() for x in (first, second)]
    stored = load_file(path / "model.safetensors")
    stored = {as_published(name): x for name, x in stored.items()} | mtp.published("mtp.0.")
    assert {"mtp.0.attn.wo_a.weight", "mtp.0.hc_head_fn", "mtp.0.ffn.gate.bias"} <= stored.keys()
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
            {"compress_ratios": [0] * 43 + [4]},
            "compress_ratios: [4] of MTP layers is not",
        ),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a number of layers"),
    ],
)
def test_mtp_layers_that_are_not_supported_are_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_model_config(published() | change)


def test_an_mtp_layer_reads_the_streams_before_their_norm():
    config = parse_model_config(published() | {"num_nextn_predict_layers": 2})
    assert config.mtp is not None
    head = mtp_head_config(config, config.mtp)
    [layer] = head.model.layers
    assert isinstance(layer.mixer, EntryAttentionConfig) and layer.mixer.spans is None
    assert head.capture == (decoder.STREAMS,) and MtpChoice().over(config.mtp).num_layers == 1
    with pytest.raises(ValueError, match="of several residual streams only the first can draft"):
        MtpChoice(count=2).over(config.mtp)
    with pytest.raises(ValueError, match="after is not possible, choose the drafter mtp"):
        mtp_head_config(config, dataclasses.replace(config.mtp, states=AFTER))
