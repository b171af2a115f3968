"""Hy4: what its configs say, and what is refused; trees against whole texts. test_parity.py has the
model's logits and transformers'."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.experts import BoundedSwiglu
from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.json.values import read_json
from jaxspec.models.tensors import splitting
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.parity import assert_close, load, paged_logits
from tests.helpers.sampling_reference import plain_logits
from tests.helpers.tree_logits import LONGEST, assert_nodes_have_logits_of_texts

CONFIG = read_json(Path(__file__).parent / "configs/hy4-preview-saved-by-transformers.json")


def test_layers_are_as_the_config_says():
    model = parse_model_config(CONFIG)
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentConfig)]
    indexer = IndexerConfig(
        2048, num_heads=16, head_dim=128, interleaved=False, rotates_last=True, norm_eps=1e-5
    )
    shared = [mixer.indexer and mixer.indexer.shared for mixer in mixers]
    assert shared == [index != 0 and index % 4 != 1 for index in range(34)]
    assert mixers[0].indexer == indexer and mixers[0].norm_eps == 1e-6
    assert {(mixer.gate, mixer.sinks) for mixer in mixers} == {("entries", True)}
    streams = StreamsConfig(4, 1, 1e-6, folded=True, magnitude=2.0)
    assert {layer.streams for layer in model.layers} == {streams}
    first, *others = (layer.mlp for layer in model.layers)
    [experts] = set[Any](others)
    assert first is not None and first.intermediate_size == 6912
    assert (experts.activation, experts.shared_activation) == (BoundedSwiglu(10.0), None)


def test_the_text_model_of_images_rotates_pairs_of_neighbours():
    folder = Path(__file__).parent / "configs"
    model = parse_model_config(read_json(folder / "hy4-saved-by-transformers.json"))
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentConfig)]
    assert len(mixers) == 78 and {mixer.interleaved for mixer in mixers} == {True}
    assert {mixer.indexer and mixer.indexer.interleaved for mixer in mixers} == {True}
    assert {mixer.norm_eps for mixer in mixers} == {1e-5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hc_mult": 0}, "hc_mult must be a positive integer, got 0"),
        ({"hc_magnitude": 0}, "hc_magnitude must be a number above 0, got 0"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be a number above 0, got 0.0"),
        ({"layer_types": ["full_attention"] * 34}, "only 'indexed_attention' in every layer"),
        ({"indexer_types": ["shared"] * 34}, "the first layer must be full"),
        ({"indexer_types": ["full"]}, "indexer_types has 1 entries for 34 layers"),
        ({"q_lora_rank": None}, "q_lora_rank must be a positive integer, got None"),
        ({"rope_interleave": True}, "rope_interleave = True is not supported, only False"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(CONFIG | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_names_of_transformers_are_read_and_mtp_layers_left_out(checkpoint, tmp_path: Path):
    """Files have other names than transformers has in memory, which it reads, too."""
    directory, tokens, expected = checkpoint("hy_v4")
    table = {".hc_pre.hc_attn_layer.hc_": ".attn_hc.", ".hc_pre.hc_mlp_layer.hc_": ".ffn_hc."}
    table |= {".hc_pre.hc_head.hc_head_": ".hc_head.hc_", "linear_gate": "gate_proj"}
    stored = dict[str, Any]()
    for name, x in load_file(directory / "model.safetensors").items():
        for old, new in (table | {"learnable_sink_param": "sinks"}).items():
            name = name.replace(old, new)
        stored[name] = x
    assert {"model.layers.0.attn_hc.fn", "model.layers.0.self_attn.sinks"} <= stored.keys()
    stored["model.mtp_layers.0.eh_proj.weight"] = np.ones((4, 8), np.float32)
    save_tensors(tmp_path, stored, read_json(directory / "config.json"))
    with pytest.warns(UserWarning, match="1 tensors are left out"):
        model = load(tmp_path)
    assert load_model_config(tmp_path).mtp is None
    assert_close(plain_logits(model, tokens), expected)


@pytest.mark.slow
def test_short_texts_attend_to_all_and_to_sinks(checkpoint):
    directory, tokens, expected = checkpoint("hy_v4")
    model, few = load(directory), tokens[:, :10]
    assert_close(plain_logits(model, few), expected[:, :10])
    assert_close(paged_logits(model, few, 5, 10), expected[:, :10])


@pytest.mark.slow
def test_what_is_written_is_what_was_read(tmp_path: Path):
    model = random_alias("hy_v4")
    save_tree(tmp_path, model, model.mapped(splitting()), raw_config("hy_v4"))
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), model)


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 13, 20])
def test_nodes_of_a_tree_have_the_logits_of_their_texts(before: int):
    assert_nodes_have_logits_of_texts(random_alias("hy_v4"), before)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["sinks", "gate", "rotation", "streams"])
def test_each_part_matters(changed: str):
    """Else the other tests would test little."""
    model = random_alias("hy_v4")
    tokens = np.random.default_rng(0).integers(0, 96, (1, LONGEST))

    def otherwise(layer: Any) -> Any:
        mixer, streams = layer.mixer, layer.streams
        match changed:
            case "sinks":
                mixer = mixer.replace(sinks=mixer.sinks + 2)
            case "gate":
                mixer = mixer.replace(gate=None)
            case "rotation" if mixer.indexer is not None:
                config = dataclasses.replace(mixer.indexer.config, rotates_last=False)
                mixer = mixer.replace(indexer=mixer.indexer.replace(config=config))
            case "streams":
                both = [
                    part.replace(base=part.base + jnp.arange(len(part.base)))
                    for part in (streams.mixer, streams.mlp)
                ]
                streams = streams.replace(mixer=both[0], mlp=both[1])
        return layer.replace(mixer=mixer, streams=streams)

    other = model.replace(layers=tuple(map(otherwise, model.layers)))
    found, expected = (np.asarray(plain_logits(each, tokens)) for each in (other, model))
    assert np.abs(found - expected).max() > 0.003
