"""ModelOpt's tensors of all experts, written from the format's description: what they mean, by a
table look-up, bit by bit, and the logits of models of them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.formats import canonical
from jaxspec.checkpoints.formats.compressed_tensors import read_compressed_tensors
from jaxspec.checkpoints.formats.modelopt import read_modelopt
from jaxspec.checkpoints.formats.widened import widened
from tests.checkpoints.formats.test_four_bits import E2M1, Stored, compressed_config
from tests.helpers.checkpoints import changed_copy
from tests.helpers.families import save_family
from tests.helpers.four_bit_checkpoints import modelopt
from tests.helpers.parity import assert_close, load
from tests.helpers.sampling_reference import plain_logits

BLOCK = "model.layers.3.mlp.experts"
COUNT, HIDDEN, UNITS = 3, 64, 32
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
DTYPES = {"uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float32": "F32"}


def of_layout(weights: np.ndarray, layout: str) -> np.ndarray:
    """[E, out, in] as the file has it."""
    return weights if layout == "outputs first" else np.ascontiguousarray(weights.swapaxes(1, 2))


def nvfp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[np.ndarray, ...]:
    """Codes [E, out, in], scales [E, out, in / 16], and the numbers that multiply these."""
    codes = rng.integers(0, 16, (COUNT, outputs, inputs))
    scales = rng.uniform(0.02, 400, (COUNT, outputs, inputs // 16)).astype(E4M3)
    return codes, scales, rng.uniform(1e-4, 1e-3, COUNT).astype(np.float32)


def means(codes: np.ndarray, scales: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Float32 weights [E, out, in]."""
    of_group = scales.astype(np.float32) * factor.reshape(-1, 1, 1)
    return E2M1[codes] * np.repeat(of_group, 16, axis=-1)


def packed(codes: np.ndarray) -> np.ndarray:
    """Two inputs in a byte, the even one in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def written(
    layout: str, factors: str, *, biases: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A block's tensors, and the weights [E, out, in] that they mean."""
    rng = np.random.default_rng(7)
    arrays: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for kind, size in (("gate_up_proj", (2 * UNITS, HIDDEN)), ("down_proj", (HIDDEN, UNITS))):
        codes, scales, factor = nvfp4(rng, *size)
        factor = factor[:1] if factors == "one" else factor
        meant[kind] = means(codes, scales, factor)
        arrays[kind] = of_layout(packed(codes), layout)
        arrays[f"{kind}_weight_scale"] = of_layout(scales, layout)
        arrays[f"{kind}_weight_scale_2"] = np.array(factor[0]) if factors == "one" else factor
        arrays[f"{kind}_input_scale"] = np.array(0.5, np.float32)
        if biases:
            arrays[f"{kind}_bias"] = np.zeros((COUNT, size[0]), np.float32)
    tensors = {
        f"{BLOCK}.{name}": Stored(f"{BLOCK}.{name}", array, DTYPES[array.dtype.name])
        for name, array in arrays.items()
    }
    return tensors, meant


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("factors", ["one", "each"])
@pytest.mark.parametrize("layout", ["inputs first", "outputs first"])
def test_nvfp4_of_all_experts_is_that_of_each(layout: str, factors: str, biases: bool):
    """Gate and up take turns where there are biases."""
    tensors, meant = written(layout, factors, biases=biases)
    read = canonical(CONFIG, tensors)
    halves = slice(0, None, 2), slice(1, None, 2)
    gate, up = halves if biases else (slice(0, UNITS), slice(UNITS, None))
    expected = {
        "gate_proj": meant["gate_up_proj"][:, gate],
        "up_proj": meant["gate_up_proj"][:, up],
        "down_proj": meant["down_proj"],
    }
    assert len(read) == COUNT * 3 * 3 + 2 * biases
    for expert in range(COUNT):
        for projection, weights in expected.items():
            found = widened(read, f"{BLOCK}.{expert}.{projection}").read()
            np.testing.assert_array_equal(found, weights[expert])


@pytest.mark.parametrize("factors", [1, COUNT])
def test_8_bit_floats_of_all_experts_are_those_of_each(factors: int):
    rng, arrays = np.random.default_rng(3), dict[str, np.ndarray]()
    for kind, size in (("gate_up_proj", (HIDDEN, 2 * UNITS)), ("down_proj", (UNITS, HIDDEN))):
        arrays[kind] = rng.uniform(-400, 400, (COUNT, *size)).astype(E4M3)
        arrays[f"{kind}_weight_scale"] = rng.uniform(0.5, 2, factors).astype(np.float32)
        arrays[f"{kind}_input_scale"] = np.ones(1, np.float32)
    tensors = {
        f"{BLOCK}.{name}": Stored(f"{BLOCK}.{name}", array, DTYPES[array.dtype.name])
        for name, array in arrays.items()
    }
    read = read_modelopt(CONFIG | {"quant_algo": "FP8"}, tensors)
    assert len(read) == COUNT * 3 * 2
    for expert in range(COUNT):
        for projection, whole, outputs in (
            ("gate_proj", "gate_up_proj", slice(0, UNITS)),
            ("up_proj", "gate_up_proj", slice(UNITS, None)),
            ("down_proj", "down_proj", slice(None)),
        ):
            module = f"{BLOCK}.{expert}.{projection}"
            values = arrays[whole][expert, :, outputs].T
            np.testing.assert_array_equal(read[f"{module}.values"].read(), values)
            scale = arrays[f"{whole}_weight_scale"][expert if factors > 1 else 0]
            assert read[f"{module}.blocks"].read() == scale


def changed(change: dict[str, Any]) -> dict[str, Any]:
    tensors, _ = written("inputs first", "one")
    for name, array in change.items():
        full = f"{BLOCK}.{name}"
        if array is None:
            del tensors[full]
        else:
            tensors[full] = Stored(full, array, DTYPES[array.dtype.name])
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"down_proj_weight_scale": None},
            "down_proj is U8, but its scales, .*weight_scale, are m",
        ),
        ({"down_proj_weight_scale_2": None}, "its scales, .*down_proj_weight_scale_2, are missing"),
        ({"down_proj": None}, "experts.down_proj is missing beside .*experts.gate_up_proj"),
        (
            {"down_proj_weight_scale": np.ones((COUNT, 4, HIDDEN), E4M3)},
            r"down_proj_weight_scale is \[3, 4, 64\], but must be \[3, 2, 64\]",
        ),
        (
            {"down_proj_weight_scale_2": np.ones(2, np.float32)},
            r"is \[2\], but must be one number, or one for each of 3 experts",
        ),
        (
            {"down_proj": np.zeros((COUNT, 8, HIDDEN), np.uint8)},
            r"which are not of the same experts",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        read_modelopt(CONFIG, changed(change))
    assert "\n" not in str(caught.value)


def test_tensors_of_all_experts_in_integers_are_named():
    name = f"{BLOCK}.gate_up_proj.weight_packed"
    tensors = {name: Stored(name, np.zeros((3, 64, 8), np.int32), "I32")}
    with pytest.raises(ValueError, match=r"weight_packed is \[3, 64, 8\], of all experts: tensors"):
        read_compressed_tensors(compressed_config(4, "int", "group", 32), tensors)


def as_modelopt_has_it(source: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention and experts in NVFP4, and the weights that they mean, by name."""
    quantized: dict[str, Any] = {}
    dense: dict[str, Any] = {}
    write, rng = modelopt().write, np.random.default_rng(0)
    for name, value in source.items():
        if name.endswith("_proj.weight") and ".self_attn." in name:
            parts, dense[name] = write(value, rng)
            quantized |= {f"{name.removesuffix('weight')}{end}": x for end, x in parts.items()}
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        weight = value.swapaxes(1, 2)
        groups = np.abs(weight).reshape(*weight.shape[:2], -1, 16)
        factor = np.float32(groups.max() / (448 * 6))
        scales = (groups.max(-1) / 6 / factor).astype(E4M3)
        steps = weight / np.repeat(scales.astype(np.float32) * factor, 16, axis=-1)
        codes = np.abs(steps[..., None] - E2M1).argmin(-1)
        quantized[name] = of_layout(packed(codes), "inputs first")
        quantized[f"{name}_weight_scale"] = of_layout(scales, "inputs first")
        quantized[f"{name}_weight_scale_2"] = np.asarray(factor)
        quantized[f"{name}_input_scale"] = np.array(1, np.float32)
        dense[name] = of_layout(means(codes, scales, factor.reshape(1)), "inputs first")
    return quantized, dense


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss"])
def test_models_of_them_have_the_logits_of_dense_ones(name: str, tmp_path: Path):
    """As ModelOpt writes Llama 4 and gpt-oss. Queries and keys of the former are rotated in
    pairs."""
    source = save_family(tmp_path / "source", name)
    quantized, dense = as_modelopt_has_it(load_file(source / "model.safetensors"))
    assert quantized.keys() > dense.keys()
    plain = ["lm_head", "*shared_expert*", "*feed_forward.*_proj"]
    fields = {"quantization_config": CONFIG | {"ignore": plain}}
    found = load(changed_copy(source, tmp_path / "quantized", fields, **quantized))
    expected = load(changed_copy(source, tmp_path / "dense", **dense))
    tokens = np.random.default_rng(0).integers(0, 320, (2, 16))
    assert_close(plain_logits(found, tokens), np.asarray(plain_logits(expected, tokens)))
