"""GLM-5-Next: what its configs say, and what is refused; its streams and its MTP layer against
transformers' own. test_parity.py compares the model's logits."""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.glm5_next import modeling_glm5_next as theirs

from jaxspec.cache import Geometry
from jaxspec.checkpoints.mtp import has_mtp_layers, load_mtp_head
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.experts import BoundedSwiglu, ExpertsConfig
from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.layer import LayerConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.pipeline_cut import pipeline_shapes
from jaxspec.models.streams import doubly_stochastic
from jaxspec.models.tensors import joining, splitting
from tests.helpers.checkpoints import save_tensors
from tests.helpers.marks import LEFT_OUT
from tests.helpers.parity import load
from tests.helpers.random_models import random_target

TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 0,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_topk": 16,
    "index_kpool": 4,
    "index_kpool_compress": True,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "indexer_types": ["full"] * 4,
    "hc_mult": 2,
    "mhc": True,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 1,
    "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
    "linear_attn_config": {
        "kda_layers": [0, 1, 2],
        "full_attn_layers": [3],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
        "gate_lower_bound": -4.0,
    },
}


def test_layers_are_as_the_config_says():
    model = parse_model_config(TEXT)
    delta = KimiDeltaConfig(num_heads=2, head_dim=8, taps=3, lowest=-4.0, flat_rates=True)
    assert [layer.mixer for layer in model.layers[:3]] == [delta] * 3
    latent, indexer = model.layers[3].mixer, IndexerConfig(16, 4, 8, False, pool=4)
    assert isinstance(latent, LatentConfig) and latent.indexer == indexer
    assert latent.rope is None and latent.stored_dim == 16 and latent.norm_eps == 1e-5
    assert {layer.streams for layer in model.layers} == {StreamsConfig(2, 20, 1e-6)}
    mlps: list[Any] = [layer.mlp for layer in model.layers]
    assert {mlp.activation for mlp in mlps} == {BoundedSwiglu(10.0)}
    assert {mlp.shared_activation for mlp in mlps[1:]} == {BoundedSwiglu(10.0)}
    assert model.is_recurrent and model.max_position == 1048576


def test_an_mtp_layer_has_attention_and_one_residual_stream():
    mtp = parse_model_config(TEXT).mtp
    assert mtp is not None and mtp.num_layers == 1
    [layer] = mtp.layers
    assert layer.streams is None and isinstance(layer.mlp, ExpertsConfig)
    assert isinstance(layer.mixer, LatentConfig) and layer.mixer.index_dim == 16
    assert parse_model_config(TEXT | {"num_nextn_predict_layers": 0}).mtp is None


def test_files_have_a_text_config_or_its_keys_beside_the_others():
    inside = {"model_type": "glm5_next", "text_config": TEXT, "vision_config": {"depth": 1}}
    flat = TEXT | {"model_type": "glm5_next", "vision_config": None, "image_token_id": 5}
    assert parse_model_config(inside) == parse_model_config(flat) == parse_model_config(TEXT)


def test_names_are_those_of_files_or_of_transformers():
    newer = {name: value for name, value in TEXT.items() if name != "linear_attn_config"}
    newer |= {"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 3}
    newer |= {"linear_lower_bound": -4.0, "layer_types": None, "head_dim": 0}
    assert parse_model_config(newer) == parse_model_config(TEXT)
    [first, *_] = parse_model_config(newer | {"linear_lower_bound": None}).layers
    assert isinstance(first.mixer, KimiDeltaConfig) and first.mixer.lowest is None


def test_a_token_keeps_a_key_and_its_gate_and_reads_a_key_of_each_pool():
    latent = parse_model_config(TEXT).layers[3].mixer
    assert isinstance(latent, LatentConfig)
    shapes = decoder_shapes(parse_model_config(TEXT), jnp.dtype(jnp.float32))
    state = jax.eval_shape(lambda: shapes.init_state(Geometry(9, 5, 1))).layers[3]
    assert [state.pages.shape, state.index_keys.shape] == [(9, 1, 5, 16)] * 2
    assert latent.entries_read(100) == 100 / 4 * 8 + 19 * 16
    assert latent.entries_read(10) == 10 / 4 * 8 + 10 * 16


def test_mixing_matrices_are_doubly_stochastic():
    scores = 3 * jax.random.normal(jax.random.key(0), (5, 4, 4))
    mixing = doubly_stochastic(scores, StreamsConfig(4, 50, 1e-6))
    for axis in (1, 2):
        np.testing.assert_allclose(mixing.sum(axis), 1, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["rnn"] * 4}, "layer_types must be a list of linear_attention and index"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for 4 layers"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "kda_layers = [0, 1, 2] contradicts layer_types, which say [0, 1, 2, 3]",
        ),
        ({"linear_attn_config": 3}, "linear_attn_config must be an object, got 3"),
        ({"linear_attn_config": {"x": 1}}, "linear_attn_config: unknown key 'x'"),
        ({"linear_attn_config": {"gate_lower_bound": 1.0}}, "decays must be below 0, got 1.0"),
        ({"linear_attn_config": {"num_heads": 0}}, "linear_num_heads must be a positive integer"),
        (
            {"indexer_types": ["full"] * 3 + ["shared"]},
            "layer 3 shares what layer 2 chooses, which",
        ),
        ({"index_kpool": 1}, "index_kpool must be 2 or more, got 1"),
        ({"index_kpool": 3}, "index_topk (16) must be a multiple of index_kpool (3)"),
        (
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail = False is not supported, only True",
        ),
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim = 4 is not supported, only 0"),
        ({"q_lora_rank": None}, "q_lora_rank must be a positive integer, got None"),
        ({"hc_mult": 0}, "hc_mult must be a positive integer, got 0"),
        ({"swiglu_limit": None}, "swiglu_limit must be a number above 0, got None"),
        ({"mhc": False}, "mhc = False is not supported, only True"),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1 contradicts num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(json.loads(json.dumps(TEXT | change)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_layers_of_several_streams_have_nothing_besides():
    layer = parse_model_config(TEXT).layers[0]
    with pytest.raises(ValueError, match="have norms before their blocks"):
        LayerConfig(layer.mixer, layer.mlp, "after", streams=layer.streams)
    with pytest.raises(ValueError, match="has a mixer and an MLP"):
        LayerConfig(layer.mixer, None, streams=layer.streams)


def test_no_stage_sends_several_streams():
    """Of a model without recurrent layers, which are refused before."""
    attending = {"layer_types": ["indexed_attention"] * 4, "linear_attn_config": None}
    config = parse_model_config(TEXT | attending)
    with pytest.raises(ValueError, match="more of a token than one residual stream, cannot be"):
        pipeline_shapes(config, jnp.dtype(jnp.float32), [], [])


@pytest.mark.slow
def test_what_is_written_is_what_was_read(tmp_path: Path):
    """By splits, and joined on a device."""
    model = random_target(parse_model_config(TEXT))
    save_tree(tmp_path, model, model.mapped(splitting()), TEXT)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.self_attn.A_log"].shape == (2,)
    assert tensors["model.layers.0.hc_attn_fn"].shape == (8, 64)
    joined = decoder_shapes(model.config, jnp.dtype(jnp.float32)).mapped(
        joining({name: jnp.asarray(x) for name, x in tensors.items()})
    )
    for other in (load(tmp_path), joined):
        jax.tree.map(np.testing.assert_array_equal, other, model)


LENGTH = 24
TOKENS = np.random.default_rng(0).integers(0, 320, (2, LENGTH))


def of_transformers(directory: Path) -> Any:
    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def captured_states(target: decoder.Decoder, *layers: int) -> Any:
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    return decoder.run(
        *(target, jnp.asarray(TOKENS), positions, target.no_states(), dense_causal_attend, layers)
    )[2]


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_heads_read_the_mean_of_the_streams(checkpoint):
    directory, _, _ = checkpoint("glm5_next")
    text, states = of_transformers(directory).model.language_model, []
    for layer in text.layers:
        layer.register_forward_hook(lambda module, given, output: states.append(output[0]))
    with torch.no_grad():
        text(torch.from_numpy(TOKENS))
    expected = torch.cat([state.mean(dim=2) for state in states[:3]], dim=-1)
    found = captured_states(load(directory), 1, 2, 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


class TorchMtp(torch.nn.Module):
    """An MTP layer of transformers' blocks, with the names of published files."""

    def __init__(self, config: Any):
        super().__init__()
        config = copy.deepcopy(config)
        config.indexer_types, config._attn_implementation = ["full"] * 3, "eager"

        def norm() -> Any:
            return theirs.Glm5NextTextRMSNorm(config.hidden_size, config.rms_norm_eps)

        self.enorm, self.hnorm, self.input_layernorm = norm(), norm(), norm()
        self.post_attention_layernorm, self.shared_head = norm(), torch.nn.Module()
        self.shared_head.norm = norm()
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = theirs.Glm5NextTextAttention(config, 1)
        self.mlp = theirs.Glm5NextTextMoE(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        tokens = torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + self.self_attn(self.input_layernorm(x), tokens)[0]
        return self.shared_head.norm(x + self.mlp(self.post_attention_layernorm(x)))


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_mtp_layers_have_the_logits_of_transformers_blocks(checkpoint, tmp_path: Path):
    path, _, _ = checkpoint("glm5_next")
    assert not has_mtp_layers(path, load_model_config(path))
    model = of_transformers(path)
    torch.manual_seed(1)
    mtp = TorchMtp(model.config.text_config)
    with torch.no_grad():
        for parameter in mtp.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
        ids = torch.from_numpy(TOKENS)
        hidden = model.model.language_model(ids).last_hidden_state
        after = mtp(model.get_input_embeddings()(ids[:, 1:]), hidden[:, :-1])
        expected = model.lm_head(after).numpy()
    prefix = "model.language_model.layers.3."
    stored = {f"{prefix}{name}": tensor.numpy() for name, tensor in mtp.state_dict().items()}
    both, down = (stored.pop(f"{prefix}mlp.experts.{kind}_proj") for kind in ("gate_up", "down"))
    gate, up = np.split(both, 2, axis=1)
    for kind, whole in {"gate": gate, "up": up, "down": down}.items():  # published one by one
        for index, matrix in enumerate(whole):
            name = f"{prefix}mlp.experts.{index}.{kind}_proj.weight"
            stored[name] = np.ascontiguousarray(matrix)
    raw = json.loads((path / "config.json").read_text())
    save_tensors(tmp_path, load_file(path / "model.safetensors") | stored, raw)

    target, config = load(tmp_path), load_model_config(tmp_path)
    assert has_mtp_layers(tmp_path, config)
    head = load_mtp_head(tmp_path, config, jnp.dtype(jnp.float32))
    positions = jnp.broadcast_to(jnp.arange(LENGTH - 1), (len(TOKENS), LENGTH - 1))
    read = head.hidden(captured_states(target, *head.capture)[:, :-1])
    out = head.run(
        target, jnp.asarray(TOKENS[:, 1:]), read, positions, (None,), dense_causal_attend
    )
    np.testing.assert_allclose(head.logits(target, out.normed), expected, rtol=0, atol=2e-4)
