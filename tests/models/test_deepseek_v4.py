"""DeepSeek-V4: what its configs say, and what is refused; published names and precision; trees
against whole texts. test_parity.py compares the model's logits with transformers', and
tests/kernels/test_entries.py attention with its definition."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import save_file

from jaxspec.cache import Geometry
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.entries import EntryAttentionConfig, EntryIndexerConfig, SpansConfig
from jaxspec.config.experts import BoundedSwiglu
from jaxspec.config.rope import RopeConfig, YarnRopeScaling
from jaxspec.config.streams import StreamsConfig
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.tensors import joining, splitting
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.checkpoints import changed_copy, save_tensors
from tests.helpers.deepseek_v4_checkpoints import ALL, SPARSE, WINDOW, as_published
from tests.helpers.families import save_family
from tests.helpers.four_bit_checkpoints import deepseek
from tests.helpers.parity import assert_close, load
from tests.helpers.quantized_checkpoints import float8_blocks, of_torch
from tests.helpers.sampling_reference import plain_logits
from tests.helpers.tree_logits import LONGEST, assert_nodes_have_logits_of_texts

PUBLISHED = Path(__file__).parent / "published/aiconfigurator/deepseek-ai--DeepSeek-V4-Flash.json"


def published() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text())


def mixers(raw: dict[str, Any]) -> list[EntryAttentionConfig]:
    found = [layer.mixer for layer in parse_model_config(raw).layers]
    assert all(isinstance(mixer, EntryAttentionConfig) for mixer in found)
    return [mixer for mixer in found if isinstance(mixer, EntryAttentionConfig)]


def test_layers_are_as_the_published_config_says():
    first, _, sparse, all_of_them, *_, last = mixers(published())
    indexer = EntryIndexerConfig(top_k=512, num_heads=64, head_dim=128)
    assert first.spans is None and first.rope == RopeConfig(64, 10000.0)
    yarn = YarnRopeScaling(16.0, 65536, attention_factor=1.0)
    assert sparse.rope == RopeConfig(64, 160000.0, yarn) == all_of_them.rope
    assert sparse.spans == SpansConfig(4, overlapping=True, indexer=indexer) == last.spans
    assert all_of_them.spans == SpansConfig(128)
    assert (first.num_heads, first.head_dim, first.window, first.query_latent) == (
        *(64, 512, 128, 1024),
    )
    assert (first.groups, first.group_rank) == (8, 1024)
    model = parse_model_config(published())
    assert {layer.streams for layer in model.layers} == {StreamsConfig(4, 20, 1e-6, folded=True)}
    mlps: list[Any] = [layer.mlp for layer in model.layers]
    assert [mlp.routing.token_ids for mlp in mlps] == [129280] * 3 + [None] * 40
    assert [mlp.routing.correction for mlp in mlps] == [False] * 3 + [True] * 40
    assert {mlp.activation for mlp in mlps} == {BoundedSwiglu(10.0)}
    assert {mlp.shared_size for mlp in mlps} == {2048}


def test_published_keys_and_those_of_transformers_say_the_same():
    kinds = {0: WINDOW, 4: SPARSE, 128: ALL}
    newer = published()
    ratios = newer.pop("compress_ratios")
    newer |= {"layer_types": [kinds[ratio] for ratio in ratios[:43]]}
    newer |= {"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40}
    newer |= {"compress_rates": {SPARSE: 4, ALL: 128}, "partial_rotary_factor": 0.125}
    yarn = newer.pop("rope_scaling") | {"rope_type": "yarn", "rope_theta": 160000}
    plain = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125}
    newer["rope_parameters"] = {"main": plain, "compress": yarn}
    assert parse_model_config(newer) == parse_model_config(published())


def test_a_token_keeps_its_vector_and_what_entries_are_made_of():
    shapes = decoder_shapes(parse_model_config(published()), jnp.dtype(jnp.bfloat16))
    states = jax.eval_shape(lambda: shapes.init_state(Geometry(9, 16, 1))).layers
    widths = [[x.shape[-1] for x in jax.tree.leaves(state)] for state in states[1:4]]
    assert widths == [[512], [512, 2048, 512], [512, 1024]]
    near, sparse, all_of_them = mixers(published())[1:4]
    assert near.entries_read(100_000) == 128 * 512
    assert sparse.entries_read(100_000) == (128 + 512) * 512 + 25_000 * 128
    assert all_of_them.entries_read(100_000) == (128 + 781) * 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [8] * 43}, "compress_ratios must be a list of 0, 4, 128, got [8,"),
        ({"compress_ratios": [0]}, "compress_ratios has 1 entries for 43 layers"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types must be a list of sliding_att"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types must be a list of hash_moe, moe"),
        ({"compress_rates": {SPARSE: 4}}, f"compress_rates must have {SPARSE} and {ALL}, got"),
        ({"compress_rate_csa": 0}, f"compress_rates: {SPARSE} must be a positive integer: 0"),
        ({"num_hash_layers": -1}, "num_hash_layers must be an integer from 0 on, got -1"),
        ({"partial_rotary_factor": 0.25}, "qk_rope_head_dim = 64 contradicts partial_rotary_fac"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim (256) must be at most head_dim (512), and"),
        ({"o_groups": 7}, "num_attention_heads (64) must be a multiple of o_groups (7)"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported, only 'sqrts"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 is not supported, only 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported, only 1"),
        ({"hc_mult": None}, "hc_mult must be a positive integer, got None"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a number above 0, got 0"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(published() | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_files_with_published_names_are_read(checkpoint, tmp_path: Path):
    directory, tokens, expected = checkpoint("deepseek_v4-yarn")
    tensors = load_file(directory / "model.safetensors")
    tensors = {as_published(name): x for name, x in tensors.items()}
    for name in (
        *("embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.hc_attn_scale"),
        *("layers.0.attn.indexer.compressor.ape", "layers.0.attn.kv_norm.weight"),
        *("layers.1.attn.compressor.norm.weight", "layers.0.ffn.gate.tid2eid"),
        *(
            "layers.2.ffn.gate.bias",
            "layers.2.ffn.experts.7.w3.weight",
            "layers.0.attn.wo_a.weight",
        ),
    ):
        assert name in tensors
    save_tensors(tmp_path, tensors, json.loads((directory / "config.json").read_text()))
    assert_close(plain_logits(load(tmp_path), tokens), expected)


@pytest.mark.parametrize("expert", [-1, 8, 2**33 + 1])
def test_a_table_of_experts_that_there_are_not_is_named(checkpoint, tmp_path: Path, expert: int):
    directory, _, _ = checkpoint("deepseek_v4")
    files = load_file(directory / "model.safetensors")
    name = next(name for name in files if name.endswith(".tid2eid"))
    files[name][3, 1] = expert
    changed: dict[str, Any] = {name: files[name]}
    with pytest.raises(
        ValueError, match=rf"tid2eid has expert {expert}, and the model's are 0 to 7"
    ):
        load(changed_copy(directory, tmp_path, **changed))


@pytest.mark.slow
def test_what_is_written_is_what_was_read(tmp_path: Path):
    """By splits, and joined on a device."""
    model = random_alias("deepseek_v4")
    save_tree(tmp_path, model, model.mapped(splitting()), raw_config("deepseek_v4"))
    tensors = {
        name: jnp.asarray(x) for name, x in load_file(tmp_path / "model.safetensors").items()
    }
    joined = decoder_shapes(model.config, jnp.dtype(jnp.float32)).mapped(joining(tensors))
    for other in (load(tmp_path), joined):
        jax.tree.map(np.testing.assert_array_equal, other, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "before"),
    [
        *(("deepseek_v4", before) for before in (1, 2, 13, 14, 18, 20)),
        *(("deepseek_v4-yarn", before) for before in (3, 15, 16)),
    ],
)
def test_nodes_of_a_tree_have_the_logits_of_their_texts(family: str, before: int):
    """And so have tokens that follow an accepted path. Nodes end spans, on several branches, and
    begin inside of them."""
    assert_nodes_have_logits_of_texts(random_alias(family), before)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["window", "entries", "indexer", "table"])
def test_each_part_matters(changed: str):
    """Else the other tests would test little."""
    model = random_alias("deepseek_v4")
    tokens = np.random.default_rng(0).integers(0, 96, (1, LONGEST))

    def without(layer: Any) -> Any:
        mixer, spans = layer.mixer, layer.mixer.config.spans
        match changed:
            case "window":
                return layer.replace(mixer=_as(mixer, window=mixer.config.window + 1))
            case "entries":
                config = dataclasses.replace(mixer.config, spans=None)
                parts: dict[str, Any] = {"compressor": None, "indexer": None}
                return layer.replace(mixer=mixer.replace(config=config, **parts))
            case "indexer" if spans and spans.indexer:
                return layer.replace(mixer=mixer.replace(indexer=None))
            case "table" if layer.mlp.of_tokens is not None:
                table = layer.mlp.of_tokens[::-1]
                return layer.replace(mlp=layer.mlp.replace(of_tokens=table))
        return layer

    other = model.replace(layers=tuple(map(without, model.layers)))
    found, expected = (np.asarray(plain_logits(each, tokens)) for each in (other, model))
    assert np.abs(found - expected).max() > 0.01


def _as(mixer: Any, **changes: Any) -> Any:
    return mixer.replace(config=dataclasses.replace(mixer.config, **changes))


@pytest.mark.slow
def test_files_in_the_published_precision_are_read(tmp_path: Path):
    """Experts in FP4, other projections in FP8 blocks, scales that are powers of two."""
    directory = save_family(tmp_path / "whole", "deepseek_v4-yarn", moe_intermediate_size=64)
    tokens = np.random.default_rng(1).integers(0, 320, (2, 40))
    blocks, rng = float8_blocks("scale", ml_dtypes.float8_e8m0fnu), np.random.default_rng(0)
    stored, meant = dict[str, Any](), dict[str, Any]()
    for name, x in load_file(directory / "model.safetensors").items():
        form = deepseek() if ".experts." in name else blocks
        if not re.search(r"\.(w[123]|w[qo]_[ab]|wkv)\.weight$", name) or ".compressor." in name:
            stored[name] = meant[name] = x
            continue
        parts, meant[name] = form.write(x, rng)
        stored |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in parts.items()}
    raw = json.loads((directory / "config.json").read_text())
    save_tensors(tmp_path / "meant", meant, raw)
    quantization = published()["quantization_config"]
    raw |= {"expert_dtype": "fp4", "quantization_config": quantization}
    folder = tmp_path / "stored"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: of_torch(x) for name, x in stored.items()}, folder / "model.safetensors")
    model = load(folder)
    other, float32 = load(tmp_path / "meant"), jnp.dtype(jnp.float32)
    for layer, plain in zip(model.layers, other.layers, strict=True):
        mixer, whole = layer.mixer, plain.mixer
        for name in ("q_in", "q", "kv_in", "o_in", "o"):
            part = getattr(mixer, name)
            assert isinstance(part, Float8Linear)
            np.testing.assert_array_equal(part.dense(float32), getattr(whole, name).dense(float32))
    # Inputs of FP8 products are rounded; so logits are compared with other projections whole.
    model = model.replace(layers=tuple(map(_with_experts_of, other.layers, model.layers)))
    found, expected = (plain_logits(each, tokens) for each in (model, other))
    assert_close(found, np.asarray(expected))


def _with_experts_of(layer: Any, quantized: Any) -> Any:
    experts = quantized.mlp
    return layer.replace(mlp=layer.mlp.replace(gate_up=experts.gate_up, down=experts.down))
