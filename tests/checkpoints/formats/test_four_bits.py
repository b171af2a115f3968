"""Formats of 4-bit numbers: what their tensors mean, by a table look-up, and what is refused."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoints.formats import canonical, named_quantization
from jaxspec.checkpoints.formats.widened import matrix_of, with_widened
from tests.helpers.quantized_checkpoints import words

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])
OUTPUTS, INPUTS = 6, 64
EXPERT, DENSE = "model.layers.0.mlp.experts.1.up_proj", "model.layers.0.self_attn.q_proj"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {np.dtype(np.uint8): "U8", E4M3: "F8_E4M3", BF16: "BF16"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that lies in memory."""

    name: str
    values: np.ndarray
    dtype: str
    file: Path = Path("model.safetensors")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, *index: slice) -> np.ndarray:
        assert all(part.step in (None, 1) for part in index), "safetensors reads no steps"
        return self.values[index]


Tensors = dict[str, tuple[np.ndarray, str]]  # values, and their dtype as safetensors names it


def stored(tensors: Tensors) -> dict[str, Any]:
    return {name: Stored(name, *one) for name, one in tensors.items()}


def vector(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def compressed_config(bits: int, kind: str, strategy: str, group: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": strategy, "group_size": group, "scale_dtype": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": compressed_config(4, "float", "group", 32) | {"format": "mxfp4-pack-quantized"},
    "nvfp4": compressed_config(4, "float", "tensor_group", 16) | {"format": "nvfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "deepseek-v4": {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
        **{"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    },
    "int4": compressed_config(4, "int", "group", 32) | {"format": "pack-quantized"},
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def module(form: str, name: str) -> tuple[Tensors, np.ndarray]:
    """The tensors of a module of random numbers, and the weights [out, in] that they mean."""
    rng = np.random.default_rng(0)
    fields = rng.integers(0, 16, (OUTPUTS, INPUTS))
    numbers = fields - 8.0 if form == "int4" else E2M1[fields]
    size = 16 if form in ("nvfp4", "modelopt") else 32
    bytes_of_pairs = (fields[:, ::2] + 16 * fields[:, 1::2]).astype(np.uint8)
    if form in ("mxfp4", "deepseek-v4"):
        scale = rng.integers(100, 140, (OUTPUTS, INPUTS // size)).astype(np.uint8)
        number, dtype, whole = np.exp2(scale.astype(np.float32) - 127), "U8", 1.0
    else:
        kind = BF16 if form == "int4" else E4M3
        scale = rng.uniform(1, 448, (OUTPUTS, INPUTS // size)).astype(kind)
        number, dtype = scale.astype(np.float32), "BF16" if form == "int4" else "F8_E4M3"
        whole = {"nvfp4": 1 / 640, "modelopt": 0.003, "int4": 1.0}[form]
    meant = (numbers * np.repeat(number, size, axis=1) * np.float32(whole)).astype(np.float32)
    packed, scales = "weight_packed", {"weight_scale": (scale, dtype)}
    match form:
        case "deepseek-v4":
            packed, scales = "weight", {"scale": (scale, "F8_E8M0")}
        case "nvfp4":
            scales["weight_global_scale"] = vector(640), "F32"
            scales["input_global_scale"] = vector(3), "F32"
        case "modelopt":
            packed = "weight"
            scales["weight_scale_2"] = np.array(0.003, np.float32), "F32"
            scales["input_scale"] = np.array(2, np.float32), "F32"
        case "int4":
            scales["weight_shape"] = np.array([OUTPUTS, INPUTS]), "I64"
    codes = (words(fields, 4), "I32") if form == "int4" else (bytes_of_pairs, "U8")
    if form == "deepseek-v4":
        codes = bytes_of_pairs.view(np.int8), "I8"
    tensors = {packed: codes, **scales}
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}, meant


def widened(tensors: dict[str, Any], name: str) -> np.ndarray:
    """The weights of a module's tensors."""
    kind = "pairs" if f"{name}.pairs" in tensors else "codes"
    read = tensors[f"{name}.{kind}"].read()
    fields = np.stack([read & 15, read >> 4], axis=-1).reshape(OUTPUTS, INPUTS)
    numbers = fields - 8.0 if kind == "pairs" else E2M1[fields]
    scale = tensors[f"{name}.scale"].read()
    number = np.exp2(scale - 127.0) if scale.dtype == np.uint8 else scale.astype(np.float32)
    factor = tensors.get(f"{name}.factor")
    by_output = np.ones(OUTPUTS) if factor is None else factor.read()
    return numbers * np.repeat(number, INPUTS // scale.shape[1], axis=1) * by_output[:, None]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((form, EXPERT) for form in ("mxfp4", "deepseek-v4", "nvfp4", "modelopt", "int4")),
        *((form, DENSE) for form in ("mxfp4", "nvfp4", "modelopt")),
    ],
)
def test_modules_keep_their_bytes(form: str, name: str):
    tensors, meant = module(form, name)
    found = canonical(CONFIGS[form], stored(tensors))
    np.testing.assert_allclose(widened(found, name), meant, rtol=3e-7)
    kinds = {"pairs" if form == "int4" else "codes", "scale"}
    kinds |= {"factor"} if form in ("nvfp4", "modelopt") else set()
    assert set(found) == {f"{name}.{kind}" for kind in kinds}
    for name, tensor in found.items():
        assert tensor.shape == tensor.read().shape
        assert tensor.dtype == ("F32" if name.endswith("factor") else DTYPES[tensor.read().dtype])


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "modelopt"])
def test_floats_are_widened_while_they_are_read_where_weights_are_wanted(form: str):
    tensors, meant = module(form, DENSE)
    packed = canonical(CONFIGS[form], stored(tensors))
    assert with_widened(packed, [f"{DENSE}.codes", "other.weight"]) == packed
    [(name, weight)] = with_widened(packed, [f"{DENSE}.weight", "other.weight"]).items()
    matrix = matrix_of(packed, DENSE)
    assert matrix is not None and matrix.shape == meant.shape
    assert name == f"{DENSE}.weight" and weight.shape == meant.shape and weight.dtype == "F32"
    np.testing.assert_allclose(weight.read(), meant, rtol=3e-7)
    for rows, columns in ((slice(2, 5), slice(7, 40)), (slice(0, 1), slice(32, 33))):
        np.testing.assert_allclose(weight.read(rows, columns), meant[rows, columns], rtol=3e-7)


def gpt_oss(**changes: Any) -> Tensors:
    """Two experts of 3 hidden units: 3 rows of gate and of up, which take turns."""
    rng = np.random.default_rng(1)
    tensors = {}
    for kind, outputs in (("gate_up_proj", 6), ("down_proj", 4)):
        blocks = rng.integers(0, 256, (2, outputs, 2, 16)).astype(np.uint8)
        scales = rng.integers(100, 140, (2, outputs, 2)).astype(np.uint8)
        tensors |= {f"{kind}_blocks": (blocks, "U8"), f"{kind}_scales": (scales, "U8")}
    tensors |= changes
    return {f"m.experts.{name}": one for name, one in tensors.items() if one is not None}


def test_experts_of_gpt_oss_are_rows_of_all():
    tensors = gpt_oss()
    found = canonical(CONFIGS["gpt-oss"], stored(tensors))
    projections = ("gate_proj", "up_proj", "down_proj")
    names = [f"m.experts.{e}.{name}" for e in range(2) for name in projections]
    assert set(found) == {f"{name}.{kind}" for name in names for kind in ("codes", "scale")}
    for expert in range(2):
        for projection, rows in zip(projections, (np.s_[::2], np.s_[1::2], np.s_[:]), strict=True):
            kind = "down_proj" if projection == "down_proj" else "gate_up_proj"
            codes = tensors[f"m.experts.{kind}_blocks"][0][expert].reshape(-1, 32)[rows]
            scale = tensors[f"m.experts.{kind}_scales"][0][expert][rows]
            name = f"m.experts.{expert}.{projection}"
            for part, wanted in (("codes", codes), ("scale", scale)):
                assert found[f"{name}.{part}"].shape == wanted.shape
                np.testing.assert_array_equal(found[f"{name}.{part}"].read(), wanted)
            piece = found[f"{name}.codes"].read(slice(1, 3), slice(5, 20))
            np.testing.assert_array_equal(piece, codes[1:3, 5:20])


def test_plain_experts_stay_as_they_are():
    tensors: Tensors = {"m.experts.gate_up_proj": (np.zeros((2, 4, 6), np.float32), "F32")}
    read = stored(tensors)
    assert canonical(CONFIGS["gpt-oss"], read) == read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": None}, "experts.down_proj_scales is missing"),
        ({"down_proj_blocks": None}, "experts.down_proj_blocks is missing"),
        ({"down_proj_blocks": (np.zeros((2, 4, 32), np.uint8), "U8")},
         "down_proj_blocks is U8 [2, 4, 32], but must be U8 [experts, outputs, groups, 16]"),
        ({"down_proj_scales": (np.zeros((2, 4, 3), np.uint8), "U8")},
         "down_proj_scales is [2, 4, 3], but must be [2, 4, 2]"),
        ({"gate_up_proj_scales": (np.full((2, 6, 2), 255, np.uint8), "U8")},
         "gate_up_proj_scales[0] has the scale 255 at [0, 0]: all must be exponents up to 252"),
        ({"down_proj_scales": (np.zeros((2, 4, 2), np.float32), "F32")},
         "down_proj_scales[0] has dtype F32: scales of 4-bit floats are U8"),
    ],
)  # fmt: skip
def test_bad_tensors_of_gpt_oss_are_named(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        for tensor in canonical(CONFIGS["gpt-oss"], stored(gpt_oss(**changes))).values():
            tensor.read()


NAN = np.full((OUTPUTS, 4), np.nan).astype(E4M3)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("nvfp4", {"weight_global_scale": None}, "up_proj.weight_global_scale is missing"),
        ("nvfp4", {"weight_scale": (NAN, "F8_E4M3")}, "weight_scale has the scale nan at [0, 0]: "),
        ("nvfp4", {"weight_scale": (NAN[:, :3], "F8_E4M3")}, "weight_scale is [6, 3], but must be"),
        ("nvfp4", {"weight_global_scale": (vector(0), "F32")}, "is 0.0, but must be above 0"),
        ("nvfp4", {"weight_global_scale": (vector(1, 2), "F32")}, "must be a single F32"),
        ("mxfp4", {"weight_packed": (np.zeros((6, 17), np.uint8), "U8")}, "groups of 32 do not"),
        ("mxfp4", {"weight_packed": None}, "up_proj.weight_packed is missing"),
        ("nvfp4", {"weight_packed": None}, "up_proj.weight_packed is missing"),
        ("deepseek-v4", {"weight": None}, "up_proj.weight is missing"),
        ("deepseek-v4", {"scale": (NAN, "F8_E4M3")}, "up_proj.scale has the scale nan"),
        ("modelopt", {"weight": (np.zeros((6, 32), np.float32), "F32")}, "up_proj.weight is F32"),
        ("modelopt", {"weight_scale": None}, "up_proj.weight_scale is missing"),
    ],
)
def test_bad_tensors_are_named(form: str, changes: dict[str, Any], message: str):
    tensors, _ = module(form, EXPERT)
    changed = tensors | {f"{EXPERT}.{part}": one for part, one in changes.items()}
    kept = {name: one for name, one in changed.items() if one is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        for tensor in canonical(CONFIGS[form], stored(kept)).values():
            tensor.read()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        (
            "modelopt",
            {"quant_algo": "FP8_PB_WO"},
            "quant_algo is 'FP8_PB_WO'; supported is 'NVFP4'",
        ),
        ("modelopt", {"group_size": 32}, "group_size is 32; supported is 16"),
        ("modelopt", {"quantization": 4}, "quantization must be an object, got 4"),
        ("gpt-oss", {"twist": 1}, "field 'twist' (= 1) is not supported"),
        ("int4", {"format": "marlin-24"}, "format is 'marlin-24'; supported is"),
    ],
)
def test_unsupported_fields_are_named(form: str, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        canonical(CONFIGS[form] | fields, {})


def test_a_text_model_may_say_how_it_is_quantized():
    """As that of Kimi K2.5, whose whole model says nothing."""
    text = {"quantization_config": CONFIGS["int4"]}
    assert named_quantization({"text_config": text, "quantization_config": None}) is not None
    assert named_quantization({"text_config": text}) == CONFIGS["int4"]
    assert named_quantization({"text_config": None}) is None


def test_the_file_of_modelopt_has_an_object_of_its_fields():
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    config = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": fields}
    tensors, _ = module("modelopt", EXPERT)
    caches: Tensors = {f"{DENSE}.k_scale": (np.array(1, np.float32), "F32")}
    assert len(canonical(config, stored(tensors | caches))) == 3
