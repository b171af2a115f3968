"""Nemotron-H: what its configs say and what is refused; its MTP layers against transformers'
blocks. test_parity.py compares the model's logits."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from jaxspec.checkpoints.mtp import has_mtp_layers, load_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.experts import ExpertsConfig, SquaredRelu
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import draft_layers
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.families import save_family

RAW: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "hybrid_override_pattern": "M*-E",
}


def test_a_layer_has_one_block():
    model = parse_model_config(RAW)
    kinds = [type(layer.mixer or layer.mlp) for layer in model.layers]
    assert kinds == [Mamba2Config, AttentionConfig, DenseConfig, ExpertsConfig]
    assert model.is_recurrent and model.num_layers == 4 and model.rms_norm_eps == 1e-5
    attention, dense, experts = model.layers[1].attention, model.layers[2].mlp, model.layers[3].mlp
    assert attention.rope.rotary_dim == 0
    assert isinstance(dense, DenseConfig) and dense.activation == SquaredRelu()
    assert isinstance(experts, ExpertsConfig) and experts.routing.correction
    [drafting] = draft_layers(model).layers
    assert drafting.attention.num_heads == 4 and drafting.units == 48


@pytest.mark.parametrize(
    "kinds",
    [["mamba", "attention", "mlp", "moe"], ["linear_attention", "full_attention", "mlp", "moe"]],
)
def test_kinds_are_letters_or_words(kinds: list[str]):
    others = {name: value for name, value in RAW.items() if name != "hybrid_override_pattern"}
    for key in ("layers_block_type", "layer_types"):
        assert parse_model_config(others | {key: kinds}) == parse_model_config(RAW)


def test_an_mtp_layer_has_a_mixer_and_an_mlp():
    [layer] = mtp_layers({"num_nextn_predict_layers": 1})
    assert isinstance(layer.mixer, AttentionConfig) and isinstance(layer.mlp, ExpertsConfig)
    assert mtp_layers({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"})
    assert parse_model_config(RAW | {"mtp_hybrid_override_pattern": "*E"}).mtp is None


def mtp_layers(change: dict[str, Any]) -> tuple[Any, ...]:
    mtp = parse_model_config(RAW | change).mtp
    assert mtp is not None
    return mtp.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hybrid_override_pattern": "M?"},
            "hybrid_override_pattern must be letters of ME*-, got 'M?'",
        ),
        ({"hybrid_override_pattern": ""}, "num_hidden_layers is 0, and 0 layers are described"),
        (
            {"layers_block_type": ["rnn"]},
            "layers_block_type must be a list of mamba, moe, attention,",
        ),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, and 4 layers are described"),
        ({"norm_eps": 1e-6}, "norm_eps = 1e-06 contradicts layer_norm_epsilon (= 1e-05)"),
        ({"mlp_bias": True}, "mlp_bias is supported in a model without experts only"),
        ({"moe_latent_size": 0}, "moe_latent_size must be a positive integer or null, got 0"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported, only 'relu2'"),
        ({"attention_bias": True}, "attention_bias = True is not supported, only False"),
        ({"attention_head_dim": 8}, "attention_head_dim = 8 contradicts head_dim (= 16)"),
        ({"n_groups": 3}, "num_heads (8) must be a multiple of num_groups (3)"),
        ({"mamba_num_heads": 0}, "mamba_num_heads must be a positive integer, got 0"),
        ({"num_nextn_predict_layers": 2}, "MTP layers are supported with num_nextn_predict_layers"),
        (
            {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M"},
            "mtp_hybrid_override_pattern *E: set num_nextn_predict_layers to 0 to do without them",
        ),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(RAW | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


TOKENS = np.random.default_rng(0).integers(0, 320, (2, 13))


class TorchMtp(torch.nn.Module):
    """An MTP layer of transformers' blocks, with the names of published files."""

    def __init__(self, config: Any):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        own = transformers.NemotronHConfig(
            **config.to_dict() | {"layers_block_type": ["full_attention", "moe"]}
        )
        own._attn_implementation = "eager"
        self.layers = torch.nn.ModuleList([NemotronHBlock(own, 0), NemotronHBlock(own, 1)])
        first, last = self.layers
        first.enorm, first.hnorm = NemotronHRMSNorm(size, eps), NemotronHRMSNorm(size, eps)
        first.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        last.final_layernorm = NemotronHRMSNorm(size, eps)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        first, last = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], dim=-1))
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        return last.final_layernorm(last(first(x, attention_mask=mask)))


@pytest.mark.slow
@pytest.mark.parametrize("latent", [None, 24])
def test_mtp_layers_have_the_logits_of_transformers_blocks(latent: int | None, tmp_path: Path):
    path = save_family(tmp_path, "nemotron_h", moe_latent_size=latent)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    torch.manual_seed(1)
    mtp = TorchMtp(model.config)
    with torch.no_grad():
        for parameter in mtp.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
        ids = torch.from_numpy(TOKENS)
        hidden = model.model(ids).last_hidden_state
        after = mtp(model.model.embeddings(ids[:, 1:]), hidden[:, :-1])
        expected = model.lm_head(after).numpy()
    stored = {f"mtp.{name}": tensor.numpy() for name, tensor in mtp.state_dict().items()}
    for name in [name for name in stored if ".experts." in name]:  # published one by one
        kind, whole = name.rpartition(".")[2], stored.pop(name)
        stored |= {
            name.replace(f".{kind}", f".{i}.{kind}.weight"): np.ascontiguousarray(one)
            for i, one in enumerate(whole)
        }
    raw = json.loads((path / "config.json").read_text())
    save_tensors(path, load_file(path / "model.safetensors") | stored, raw)
    without = load_decoder(path, load_model_config(path), jnp.dtype(jnp.float32))
    assert not has_mtp_layers(path, without.config)

    raw["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(path)
    target = load_decoder(path, config, jnp.dtype(jnp.float32))
    head = load_mtp_head(path, config, jnp.dtype(jnp.float32))
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    _, _, captured = decoder.run(
        target,
        jnp.asarray(TOKENS),
        positions,
        target.no_states(),
        dense_causal_attend,
        head.capture,
    )
    assert captured is not None
    read = jnp.asarray(TOKENS[:, 1:]), head.hidden(captured[:, :-1]), positions[:, :-1]
    out = head.run(target, *read, (None,), dense_causal_attend)
    np.testing.assert_allclose(out.normed, after, rtol=0, atol=1e-4)
    np.testing.assert_allclose(head.logits(target, out.normed), expected, rtol=0, atol=2e-4)
