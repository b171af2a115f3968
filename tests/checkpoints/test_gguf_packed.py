"""Weights of the type Q4_0 stay packed in a bfloat16 model; all others are widened."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.linear import Linear
from jaxspec.models.nodes import nodes_of
from jaxspec.models.quantized.grouped import GroupedLinear
from tests.helpers.gguf_files import MODELS, hf_model, write_gguf

Q4_0, Q4_1 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1
# What llama.cpp's mixtures do: a few tensors have another type.
OTHERS = {"blk.0.attn_v.weight": Q4_1, "blk.1.ffn_up.weight": Q4_1, "output.weight": Q4_1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loaded(path: Path, dtype: str) -> Any:
    folder = resolve_directory(path)
    return load_decoder(folder, load_model_config(folder), jnp.dtype(dtype))


def linears(decoder: Any) -> list[Any]:
    return nodes_of(decoder, Linear, GroupedLinear)


@pytest.mark.parametrize("name", ["qwen2", "llama with biases", "phi3"])
def test_packed_weights_are_the_widened_ones(name: str, tmp_path: Path):
    """Also of rotated heads, whose rows change places, and of fused projections."""
    path, model = tmp_path / "model.gguf", MODELS[name]
    write_gguf(hf_model(model), model, path, Q4_0)
    packed, wide = (linears(loaded(path, dtype)) for dtype in ("bfloat16", "float32"))
    assert all(isinstance(linear, GroupedLinear) for linear in packed)
    rng = np.random.default_rng(0)
    for ours, theirs in zip(packed, wide, strict=True):
        assert isinstance(theirs, Linear) and ours.values.dtype == jnp.int4
        weights = theirs.weight
        x = jnp.asarray(rng.normal(size=(3, len(weights))), jnp.float32)
        dense = jnp.moveaxis(ours.dense(jnp.dtype("float32")), -1, 0)
        np.testing.assert_array_equal(dense, weights)
        ours, theirs = (linear.replace(bias=None) for linear in (ours, theirs))  # it is rounded
        found, wanted = ours.float32(x), theirs(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_projections_of_several_types_are_widened_and_others_stay_packed(tmp_path: Path):
    path, model = tmp_path / "model.gguf", MODELS["qwen2"]
    write_gguf(hf_model(model), model, path, Q4_0, OTHERS)
    decoder = loaded(path, "bfloat16")
    first, second = decoder.layers
    assert isinstance(decoder.lm_head, Linear)
    assert isinstance(first.mixer.qkv, Linear) and isinstance(first.mixer.o, GroupedLinear)
    assert isinstance(second.mixer.qkv, GroupedLinear)
    assert {type(linear) for linear in linears(first.mlp)} == {GroupedLinear}
    assert {type(linear) for linear in linears(second.mlp)} == {Linear, GroupedLinear}


def test_experts_are_widened(tmp_path: Path):
    path, model = tmp_path / "model.gguf", MODELS["qwen3moe"]
    write_gguf(hf_model(model), model, path, Q4_0)
    decoder = loaded(path, "bfloat16")
    assert not nodes_of(decoder.layers[0].mlp, GroupedLinear)
    assert isinstance(decoder.layers[0].mixer.qkv, GroupedLinear)
