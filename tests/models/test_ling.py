"""Ling 3: what its configs say, and what is refused; its MTP layer against transformers' blocks.
test_parity.py compares the model's logits, without the limits, which transformers does not read."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as theirs

from jaxspec.checkpoints.mtp import has_mtp_layers, load_mtp_head
from jaxspec.config.experts import ExpertsConfig, LimitedSwiglu
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.parity import load

RAW: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "architectures": ["BailingMoeV3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "eos_token_id": None,
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "num_nextn_predict_layers": 1,
    "expert_swiglu_limit_list": [0, 0, 0, 4],
    "share_expert_swiglu_limit_list": [0, 0, 5, 7],
}


def test_layers_are_as_the_config_says():
    model = parse_model_config(RAW)
    delta = KimiDeltaConfig(2, 8, 4, lowest=-5.0, flat_rates=True, direct=True)
    assert [layer.mixer for layer in model.layers[::2]] == [delta] * 2
    attention = model.layers[1].mixer
    assert (
        isinstance(attention, LatentConfig) and attention.gate == "heads" and attention.interleaved
    )
    assert attention.rope is not None and attention.rope.head_dim == 4
    assert attention.rope.theta == 6e6 and attention.rope.rotary_dim is None
    assert model.is_recurrent and model.max_position == 262144
    [unsafe, *_] = parse_model_config(RAW | {"kda_safe_gate": False}).layers
    assert isinstance(unsafe.mixer, KimiDeltaConfig) and unsafe.mixer.lowest is None


def test_limits_are_those_of_each_layer():
    """They are of what SiLU gives."""
    model = parse_model_config(RAW)
    experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsConfig)]
    assert [mlp.activation for mlp in experts] == [None, None, LimitedSwiglu(4.0)]
    shared = [mlp.shared_activation for mlp in experts]
    assert shared == [None, LimitedSwiglu(5.0), LimitedSwiglu(7.0)]
    assert model.mtp is not None
    [drafting] = model.mtp.layers
    assert isinstance(drafting.mixer, LatentConfig) and isinstance(drafting.mlp, ExpertsConfig)
    assert drafting.mlp.activation is None


def test_names_are_those_of_files_or_of_transformers():
    own = ("head_dim", "partial_rotary_factor", "rotary_dim", "n_group", "num_experts_per_tok")
    newer = {name: value for name, value in RAW.items() if name not in own}
    newer |= {"head_dim": 4, "linear_head_dim": 8, "linear_num_heads": 2, "num_expert_group": 2}
    newer |= {"linear_conv_kernel_dim": 4, "num_experts_per_token": 2, "model_max_length": 262144}
    newer |= {"rope_parameters": {"rope_theta": 6e6, "rope_type": "default"}}
    newer |= {"architectures": ["BailingHybridForCausalLM"]}
    assert parse_model_config(newer) == parse_model_config(RAW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_group_size": [1, 0]}, "layer_group_size must be a positive integer, got [1, 0]"),
        ({"layer_types": ["rnn"] * 4}, "layer_types must be a list of full_attention and linear"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor = 1.0 of head_dim = 8 contradicts"),
        ({"rotary_dim": 8}, "rotary_dim = 8 contradicts qk_rope_head_dim (= 4)"),
        ({"kda_lower_bound": None}, "kda_lower_bound must be a number, got None"),
        ({"kda_lower_bound": 1.0}, "the lower bound of decays must be below 0, got 1.0"),
        ({"no_kda_lora": False}, "no_kda_lora = False is not supported, only True"),
        ({"use_mla_nope": True}, "use_mla_nope = True is not supported, only False"),
        (
            {"gated_attention_proj_granularity_type": "element_wise"},
            "'element_wise' is not supported, only 'head_wise'",
        ),
        ({"expert_swiglu_limit_list": [0]}, "expert_swiglu_limit_list has 1 entries for 4 layers"),
        ({"moe_shared_expert_intermediate_size": 8}, "contradicts moe_intermediate_size (= 16)"),
        ({"num_experts_per_token": 3}, "num_experts_per_tok = 2 contradicts num_experts_per_token"),
        ({"short_conv_kernel_size": None}, "short_conv_kernel_size must be a positive integer"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(json.loads(json.dumps(RAW | change)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


LENGTH = 14
TOKENS = np.random.default_rng(0).integers(0, 320, (2, LENGTH))


class TorchMtp(torch.nn.Module):
    """An MTP layer of transformers' blocks, with the names of published files."""

    def __init__(self, config: Any):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layer = theirs.BailingHybridDecoderLayer(config, 1)  # attention and experts
        self.rotary = theirs.BailingHybridRotaryEmbedding(config)
        self.enorm, self.hnorm, self.final_layernorm = (
            theirs.BailingHybridRMSNorm(size, eps) for _ in range(3)
        )
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        places = self.rotary(x, torch.arange(length)[None])
        out = self.layer(x, attention_mask=mask, position_embeddings=places)
        return self.final_layernorm(out)


def published(name: str) -> str:
    """The name of a tensor of TorchMtp in files."""
    name = name.removeprefix("layer.").replace("self_attn.", "attention.")
    name = name.replace("attention.o_proj", "attention.dense")
    return "model.layers.3." + name.replace("e_score_correction_bias", "expert_bias")


@pytest.mark.slow
def test_mtp_layers_have_the_logits_of_transformers_blocks(checkpoint, tmp_path: Path):
    path, _, _ = checkpoint("bailing_hybrid")
    assert not has_mtp_layers(path, load_model_config(path))
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    mtp = TorchMtp(model.config)
    with torch.no_grad():
        for parameter in mtp.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
        ids = torch.from_numpy(TOKENS)
        hidden = model.model(ids).last_hidden_state
        after = mtp(model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1])
        expected = model.lm_head(after).numpy()
    stored: dict[str, Any] = {}
    for name, tensor in mtp.state_dict().items():
        if ".experts." not in name:
            stored[published(name)] = tensor.numpy()
            continue
        kinds = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
        for kind, whole in zip(kinds, np.split(tensor.numpy(), len(kinds), axis=1), strict=True):
            for index, matrix in enumerate(whole):  # published one by one
                key = f"model.layers.3.mlp.experts.{index}.{kind}.weight"
                stored[key] = np.ascontiguousarray(matrix)
    raw = json.loads((path / "config.json").read_text())
    save_tensors(tmp_path, load_file(path / "model.safetensors") | stored, raw)

    target, config = load(tmp_path), load_model_config(tmp_path)
    head = load_mtp_head(tmp_path, config, jnp.dtype(jnp.float32))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    whole = target, jnp.asarray(TOKENS), positions, target.no_states(), dense_causal_attend
    captured = decoder.run(*whole, head.capture)[2]
    assert captured is not None
    read = jnp.asarray(TOKENS[:, 1:]), head.hidden(captured[:, :-1]), positions[:, :-1]
    out = head.run(target, *read, (None,), dense_causal_attend)
    np.testing.assert_allclose(head.logits(target, out.normed), expected, rtol=0, atol=2e-4)
