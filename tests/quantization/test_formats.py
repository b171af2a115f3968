"""Quantized checkpoints of every format: what they mean, over devices, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import load_model_config
from jaxspec.models.linear import Linear
from jaxspec.parallel import MODEL_AXIS, make_mesh, partition_specs
from jaxspec.quantization.float8 import Float8Linear, round_tokens
from jaxspec.quantization.grouped import GroupedLinear
from jaxspec.weights.safetensors_io import load_decoder, save_decoder
from tests.checkpoints import tiny_llama, tiny_qwen2
from tests.quantized_checkpoints import FORMATS, quantize_checkpoint

TOKENS = np.random.default_rng(3).integers(0, 320, (2, 12))
FLOATS = ("float8", "float8 blocks")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source"), **SIZES)


@pytest.fixture(scope="module")
def checkpoints(source: Path, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Of each format: the quantized checkpoint, and a dense one of the same weights."""
    folder = tmp_path_factory.mktemp("quantized")
    return {
        name: quantize_checkpoint(source, folder / name, form) for name, form in FORMATS.items()
    }


def load(directory: Path, **options: Any) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype("float32"), **options)


def logits(model: Decoder, tokens: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
    return decoder.logits(model, hidden)


def weights_of(linear: Any) -> np.ndarray:
    """[*out, in] in float32."""
    if isinstance(linear, GroupedLinear):
        return np.asarray(linear.dense(jnp.dtype("float32")))
    if isinstance(linear, Float8Linear):
        by_group = linear.values.astype(jnp.float32).reshape(*linear.scale.shape, -1)
        return np.asarray((by_group * linear.scale[..., None]).reshape(linear.values.shape))
    return np.moveaxis(np.asarray(linear.weight), 0, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_what_the_format_says(name: str, checkpoints):
    quantized, reference = (load(folder) for folder in checkpoints[name])
    kind = Float8Linear if name in FLOATS else GroupedLinear
    for ours, theirs in zip(quantized.layers, reference.layers, strict=True):
        for found, wanted in (
            (ours.mixer.qkv, theirs.mixer.qkv),
            (ours.mixer.o, theirs.mixer.o),
            (ours.mlp.gate_up, theirs.mlp.gate_up),
            (ours.mlp.down, theirs.mlp.down),
        ):
            assert isinstance(found, kind)
            np.testing.assert_allclose(weights_of(found), weights_of(wanted), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in FLOATS])
@pytest.mark.parametrize("devices", [1, 2])
def test_logits_are_those_of_the_dense_weights(name: str, checkpoints, devices: int):
    quantized, reference = checkpoints[name]
    mesh = make_mesh(tensor_parallel=devices)
    model = load(quantized, mesh=mesh)
    found = np.asarray(sharded_logits(model, mesh))
    wanted = np.asarray(jax.jit(logits)(load(reference), TOKENS))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def sharded_logits(model: Decoder, mesh: Any) -> Any:
    forward = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(partition_specs(model), P()),
        out_specs=P(None, None, MODEL_AXIS),
        check_vma=False,
    )
    return jax.jit(forward)(model, jnp.asarray(TOKENS))


@pytest.mark.parametrize("name", FLOATS)
def test_products_of_floats_round_their_inputs(name: str, checkpoints):
    quantized, reference = (load(folder).layers[0].mlp.down for folder in checkpoints[name])
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    x[1] = 0  # no scale
    x[2] *= 1e4
    groups = x.reshape(3, quantized.scale.shape[-1], -1)
    step = np.maximum(np.abs(groups).max(-1, keepdims=True) / 448, 1e-30)
    read = ((groups / step).astype(jnp.float8_e4m3fn).astype(np.float32) * step).reshape(x.shape)
    wanted = read @ np.asarray(reference.weight)
    np.testing.assert_allclose(quantized(x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(read, x, rtol=0.07, atol=1e-3 * np.abs(x).max())


def test_tokens_are_rounded_by_themselves():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    whole, scales = round_tokens(x, 2)
    for row in range(4):
        one, scale = round_tokens(x[row : row + 1], 2)
        np.testing.assert_array_equal(one[0].view(jnp.uint8), whole[row].view(jnp.uint8))
        np.testing.assert_array_equal(scale[0], scales[row])


@pytest.mark.parametrize("name", FLOATS)
def test_floats_over_devices_are_those_of_one(name: str, checkpoints):
    quantized, _ = checkpoints[name]
    wanted = np.asarray(jax.jit(logits)(load(quantized), TOKENS))
    mesh = make_mesh(tensor_parallel=2)
    found = np.asarray(sharded_logits(load(quantized, mesh=mesh), mesh))
    if name == "float8":  # a device rounds its part of the inputs with a scale of its own
        np.testing.assert_allclose(found, wanted, atol=0.2 * np.abs(wanted).max())
    else:
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
