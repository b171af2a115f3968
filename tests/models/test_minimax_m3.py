"""MiniMax M3: what its configs say, and what is refused; trees against whole texts.
test_parity.py compares the model's logits with transformers', and
tests/kernels/test_chosen_blocks.py attention with its definition."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Geometry
from jaxspec.checkpoints.formats import canonical
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.blocks import BlockIndexConfig
from jaxspec.config.experts import ClampedSwiglu
from jaxspec.config.mixers import AttentionConfig, BlockSparseConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import draft_layers
from jaxspec.config.rope import RopeConfig
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import splitting
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.minimax_m3_checkpoints import FULL, SPARSE
from tests.helpers.parity import load
from tests.helpers.sampling_reference import plain_logits
from tests.helpers.tree_logits import LONGEST, assert_nodes_have_logits_of_texts

PUBLISHED = Path(__file__).parent / "published/aiconfigurator/MiniMaxAI--MiniMax-M3.json"


def published() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text())


def test_layers_are_as_the_published_config_says():
    model = parse_model_config(published())
    index = BlockIndexConfig(head_dim=128, size=128, top_k=16, local=1)
    attention = AttentionConfig(64, 4, RopeConfig(128, 5e6, rotary_dim=64), qk_norm=True)
    activation = ClampedSwiglu(1.702, 7.0)
    mixers, mlps = zip(*((layer.mixer, layer.mlp) for layer in model.layers), strict=True)
    assert mixers == (attention,) * 3 + (BlockSparseConfig(attention, index),) * 57
    assert mlps[:3] == (DenseConfig(12288, activation=activation),) * 3
    [experts] = set[Any](mlps[3:])
    assert (experts.intermediate_size, experts.shared_size) == (3072, 3072)
    assert (experts.activation, experts.shared_activation) == (activation, activation)
    assert (experts.routing.top_k, experts.routing.num_experts) == (4, 128)
    assert (experts.routing.scale, experts.routing.correction) == (2.0, True)
    assert model.norm_offset == 1


def test_published_keys_and_those_of_transformers_say_the_same():
    newer = published()
    for name in ("sparse_attention_config", "moe_layer_freq"):
        newer.pop(name)
    newer |= {"layer_types": [FULL] * 3 + [SPARSE] * 57, "hidden_act": "silu"}
    newer |= {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57, "index_n_heads": 4}
    newer |= {"model_type": "minimax_m3_vl_text", "architectures": ["MiniMaxM3VLForCausalLM"]}
    assert parse_model_config(newer) == parse_model_config(published())


@pytest.mark.parametrize("kind", ["minimax_m2", "minimax_m3", "minimax_m3_vl_text", None])
def test_a_text_model_has_one_of_several_names(kind: str | None):
    inner = {key: value for key, value in published().items() if key != "model_type"}
    inner |= {} if kind is None else {"model_type": kind}
    whole = {"model_type": "minimax_m3_vl", "text_config": inner, "vision_config": {}}
    assert parse_model_config(whole) == parse_model_config(published())


def test_a_token_keeps_its_keys_values_and_an_index_key():
    shapes = decoder_shapes(parse_model_config(published()), jnp.dtype(jnp.bfloat16))
    states = jax.eval_shape(lambda: shapes.init_state(Geometry(9, 16, 1))).layers
    pages = [[x.shape[1::2] for x in jax.tree.leaves(state)] for state in states[2:4]]
    assert pages == [[(4, 128)] * 2, [(4, 128)] * 2 + [(1, 128)]]


def test_draft_heads_have_the_sizes_of_layers_that_choose_blocks():
    raw = raw_config("minimax_m3-local")
    [layer] = draft_layers(parse_model_config(raw)).layers
    attention = layer.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 4, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk_blocks": 8}, "index_topk_blocks = 8 contradicts sparse_attention_config (="),
        ({"layer_types": [FULL] * 60}, "contradicts sparse_attention_config"),
        ({"mlp_layer_types": ["sparse"] * 60}, "contradicts moe_layer_freq"),
        ({"moe_layer_freq": [1, 2]}, "moe_layer_freq must be a list of 0 and 1, got [1, 2]"),
        ({"moe_layer_freq": [1]}, "mlp_layer_types has 1 entries for 60 layers"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace = 2 contradicts the kinds of MLPs"),
        ({"num_key_value_heads": 8}, "index_n_heads = 4 is not supported, only num_key_value_hea"),
        ({"rotary_dim": 32}, "rotary_dim = 32 of head_dim 128 contradicts partial_rotary_factor"),
        ({"partial_rotary_factor": None}, "partial_rotary_factor (absent: whole heads are rotated"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size = 64 contradicts intermediate_siz"),
        ({"use_gemma_norm": False}, "use_gemma_norm = False is not supported, only True"),
        ({"attention_output_gate": True}, "attention_output_gate = True is not supported, only"),
        ({"num_mtp_modules": -1}, "num_mtp_modules must be a number of layers, got -1"),
        ({"sparse_attention_config": 3}, "sparse_attention_config must be an object, got 3"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(published() | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_score_type": "lse"}, "sparse_score_type = 'lse' is not supported, only 'max'"),
        ({"sparse_init_block": 1}, "sparse_init_block = 1 is not supported, only 0"),
        ({"use_sparse_attention": False}, "use_sparse_attention = False is not supported, only Tr"),
        ({"a_new_field": 1}, "sparse_attention_config: unknown key 'a_new_field'"),
        ({"sparse_local_block": 17}, "index_local_blocks (17) must be at most index_topk_blocks"),
        ({"sparse_index_dim": 32}, "index_head_dim (32) must be at least rotary_dim (64)"),
        ({"sparse_disable_index_value": [0] * 60}, "sparse_disable_index_value must be 1 where sp"),
    ],
)
def test_what_index_heads_do_not_do_is_named(change: dict[str, Any], message: str):
    raw = published()
    raw["sparse_attention_config"] |= change
    with pytest.raises(ValueError) as caught:
        parse_model_config(raw)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_blocks_of_mxfp8_have_one_size():
    said = {"quant_method": "mxfp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match=r"mxfp8 goes with weight_block_size \[1, 32\], not \[128"):
        canonical(said, {})


@pytest.mark.slow
def test_what_is_written_is_what_was_read(tmp_path: Path):
    model = random_alias("minimax_m3")
    save_tree(tmp_path, model, model.mapped(splitting()), raw_config("minimax_m3"))
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "before"),
    [
        *(("minimax_m3", before) for before in (1, 3, 13, 14, 18, 20)),
        *(("minimax_m3-local", before) for before in (2, 15, 19)),
    ],
)
def test_nodes_of_a_tree_have_the_logits_of_their_texts(family: str, before: int):
    """Nodes begin blocks and end them, on several branches."""
    assert_nodes_have_logits_of_texts(random_alias(family), before)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"top_k": 30}, {"local": 2}, {"size": 4}])
def test_the_choice_of_blocks_matters(change: dict[str, int]):
    """Else the other tests would test little."""
    model = random_alias("minimax_m3")
    tokens = np.random.default_rng(0).integers(0, 96, (1, LONGEST))

    def choosing_otherwise(layer: Any) -> Any:
        config = layer.mixer.config
        if not isinstance(config, BlockSparseConfig):
            return layer
        index = dataclasses.replace(config.index, **change)
        config = dataclasses.replace(config, index=index)
        return layer.replace(mixer=layer.mixer.replace(config=config))

    other = model.replace(layers=tuple(map(choosing_otherwise, model.layers)))
    found, expected = (np.asarray(plain_logits(each, tokens)) for each in (other, model))
    assert np.abs(found - expected).max() > 0.01
