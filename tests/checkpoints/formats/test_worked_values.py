"""Of every format of floats of few bits: values worked out by hand, bit for bit, and misuse."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoints.formats import canonical

MODULE, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"
E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
DTYPES = {"uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32"}
DTYPES |= {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class Stored:
    name: str
    values: np.ndarray
    dtype: str
    file: Path = Path("model.safetensors")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, *index: slice) -> np.ndarray:
        return self.values[index]


def stored(module: str, **parts: Any) -> dict[str, Any]:
    found = {}
    for part, values in parts.items():
        name = f"{module}.{part}"
        found[name] = Stored(name, values, DTYPES[values.dtype.name])
    return found


def fill(byte: int, *shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.full(shape, byte, np.uint8).view(dtype)


def number(value: float, dtype: Any = np.float32, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.full(shape, value, dtype)


def compressed(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    inputs = more.pop("inputs", None)
    weights |= {"strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


TOKENS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
OF_FILE = TOKENS | {"dynamic": False, "strategy": "tensor"}
GROUPS = TOKENS | {"strategy": "group", "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
STATIC = FP8 | {"activation_scheme": "static", "weight_block_size": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
    "nvfp4": compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    "mxfp8": compressed("mxfp8-quantized", 8, "float", "group", group_size=32, inputs=GROUPS),
    "tokens": compressed("float-quantized", 8, "float", "tensor", inputs=TOKENS),
    "static": compressed("float-quantized", 8, "float", "tensor", inputs=OF_FILE),
    "int4": compressed("pack-quantized", 4, "int", "group", group_size=32),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt channels": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "modelopt mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "modelopt mixed": {
        **{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "quantized_layers": {MODULE: {"quant_algo": "FP8"}, EXPERT: {"quant_algo": "NVFP4"}},
    },
    "blocks": FP8 | {"weight_block_size": [128, 128]},
    "fp8 mxfp8": FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    "mxfp8 by name": {"quant_method": "mxfp8", "ignored_layers": []},
    "mistral": STATIC,
    "deepseek-v4": FP8 | {"weight_block_size": [128, 128]},
}
# Bytes of 8-bit floats: 0x38 is 1, 0x3C is 1.5, 0x7E is 448, 0xC5 is -3.25; of a pair of 4-bit
# floats 0xA7 is 6, then -1.
VALUES = fill(0xC5, 2, 32, dtype=E4M3)
PAIRS = fill(0xA7, 2, 16)
CASES: list[tuple[str, dict[str, np.ndarray], list[float]]] = [
    ("mxfp4", {"weight_packed": PAIRS, "weight_scale": fill(125, 2, 1)}, [1.5, -0.25]),
    ("deepseek-v4", {"weight": PAIRS.view(np.int8), "scale": fill(125, 2, 1)}, [1.5, -0.25]),
    # Compressed-tensors divides by its number, ModelOpt multiplies.
    ("nvfp4", {"weight_packed": PAIRS, "weight_scale": fill(0x3C, 2, 2, dtype=E4M3),
               "weight_global_scale": number(4, shape=(1,))}, [2.25, -0.375]),
    ("modelopt", {"weight": PAIRS, "weight_scale": fill(0x3C, 2, 2, dtype=E4M3),
                  "weight_scale_2": number(4), "input_scale": number(9)}, [36, -6]),
    ("modelopt mixed", {"weight": PAIRS, "weight_scale": fill(0x38, 2, 2, dtype=E4M3),
                        "weight_scale_2": number(2)}, [12, -2]),
    ("blocks", {"weight": VALUES, "weight_scale_inv": number(0.5, shape=(1, 1))}, [-1.625]),
    ("fp8 mxfp8", {"weight": VALUES, "weight_scale_inv": fill(124, 2, 1)}, [-0.40625]),
    ("mxfp8", {"weight": VALUES, "weight_scale": fill(130, 2, 1)}, [-26]),
    ("mxfp8 by name", {"weight": VALUES, "weight_scale_inv": fill(124, 2, 1)}, [-0.40625]),
    ("modelopt mxfp8", {"weight": VALUES, "weight_scale": fill(127, 2, 1)}, [-3.25]),
    ("mistral", {"weight": VALUES, "weight_scale_inv": number(0.5, BF16),
                 "activation_scale": number(2, BF16)}, [-1.625]),
    ("mistral", {"weight": VALUES, "qscale_weight": number(0.5), "qscale_act": number(2)},
     [-1.625]),
    ("tokens", {"weight": VALUES, "weight_scale": number(2, BF16, (1,))}, [-6.5]),
    ("static", {"weight": VALUES, "weight_scale": number(2, BF16, (1,)),
                "input_scale": number(0.25, shape=(1,))}, [-6.5]),
    ("modelopt fp8", {"weight": VALUES, "weight_scale": number(2), "input_scale": number(0.25)},
     [-6.5]),
    ("modelopt channels", {"weight": VALUES, "weight_scale": number(4, shape=(2,))}, [-13]),
    ("int4", {"weight_packed": np.full((2, 4), 0x0F080F08, np.int32),  # 0 and 7; 0 and -8
              "weight_scale": number(0.5, BF16, (2, 1)), "weight_shape": np.array([2, 32])},
     [0, -4, 3.5, -4]),
]  # fmt: skip
MEASURED = ("activation_scale", "qscale_act", "input_scale")  # scales of inputs
IDS = [f"{form} {'/'.join(parts)}" for form, parts, _ in CASES]


def widened(tensors: dict[str, Any], module: str) -> np.ndarray:
    """Float32 [out, in], entry by entry, of a module of a few outputs and inputs."""
    parts: dict[str, np.ndarray] = {
        name.removeprefix(f"{module}."): tensor.read()
        for name, tensor in tensors.items()
        if name.startswith(f"{module}.")
    }
    if (weight := parts.get("weight")) is not None:
        return weight
    kind = next(kind for kind in ("values", "codes", "pairs") if kind in parts)
    values, scale = parts[kind], parts["scale" if "scale" in parts else "blocks"]
    if kind != "values":
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        table = np.concatenate([table, -table]) if kind == "codes" else np.arange(16) - 8.0
        values = table[np.stack([values & 15, values >> 4], -1)].reshape(len(values), -1)
    if scale.dtype == np.uint8:
        scale = np.exp2(scale.astype(np.float32) - 127)
    wide = np.repeat(scale.astype(np.float32), values.shape[1] // scale.shape[1], axis=1)
    factor = parts.get("factor", np.ones(len(values), np.float32))
    return values.astype(np.float32) * wide * factor[:, None]


@pytest.mark.parametrize("module", [MODULE, EXPERT], ids=["module", "expert"])
@pytest.mark.parametrize(("form", "parts", "wanted"), CASES, ids=IDS)
def test_values_are_those_worked_out(
    form: str, parts: dict[str, np.ndarray], wanted: list[float], module: str
):
    found = canonical(CONFIGS[form], stored(module, **parts))
    repeated = np.tile(np.array(wanted, np.float32), (2, 32 // len(wanted)))
    np.testing.assert_array_equal(widened(found, module), repeated)
    assert not [name for name in found if name.endswith(("_scale", "_act", "scale_inv"))]
    measured = [part.item() for name, part in parts.items() if name in MEASURED]
    is_rounded = measured and f"{MODULE}.values" in found
    assert (f"{MODULE}.inputs" in found) == bool(is_rounded)
    if is_rounded:
        np.testing.assert_array_equal(found[f"{MODULE}.inputs"].read(), measured * 2)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mxfp8", {"weight_scale": fill(255, 2, 1)}, "weight_scale has the scale"),
    ("mxfp8", {"weight_scale": fill(127, 2, 2)}, "weight_scale is [2, 2], but must be [2, 1]"),
    ("mxfp8", {"weight": fill(0x7F, 2, 32, dtype=E4M3)}, "values that are no numbers (NaN)"),
    ("modelopt mxfp8", {"weight_scale": None}, "is F8_E4M3, but the scales of"),
    ("modelopt fp8", {"weight_scale": number(0)}, "weight_scale has the scale 0.0"),
    ("modelopt fp8", {"weight_scale": number(2, shape=(3,))}, "is [3, 1], but must be [2, 1]"),
    ("modelopt fp8", {"weight": PAIRS}, "weight_scale_2 is missing"),
    ("static", {"input_scale": None}, "input_scale is missing"),
    ("static", {"input_scale": number(np.nan)}, "input_scale is nan, but must be above 0"),
    ("static", {"input_scale": number(1, shape=(2,))}, "must be a single F32, BF16 or F16"),
    ("tokens", {"input_scale": number(1)}, "input_scale is there, but input_activations are dyn"),
    ("mistral", {"activation_scale": None}, "activation_scale is missing, as quantization_config"),
    ("mistral", {"weight_scale_inv": number(np.inf, BF16)}, "has the scale inf"),
    ("blocks", {"activation_scale": number(1)}, "activation_scale is there, but quantization_con"),
    ("fp8 mxfp8", {"weight_scale_inv": number(1, shape=(1, 1))}, "[1, 1], but must be [2, 1]"),
]


@pytest.mark.parametrize(("form", "changes", "message"), WRONG)
def test_misuse_is_named(form: str, changes: dict[str, Any], message: str):
    parts = next(parts for name, parts, _ in CASES if name == form)
    kept = {name: part for name, part in (parts | changes).items() if part is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        for tensor in canonical(CONFIGS[form], stored(MODULE, **kept)).values():
            tensor.read()
    assert MODULE in str(error.value) and "\n" not in str(error.value)


def inputs_of(form: str, **changes: Any) -> dict[str, Any]:
    """A config with other fields of its input_activations."""
    [group] = CONFIGS[form]["config_groups"].values()
    group = group | {"input_activations": group["input_activations"] | changes}
    return CONFIGS[form] | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIGS["blocks"] | {"activation_scheme": "static"}, "goes with weight_block_size null"),
        (CONFIGS["blocks"] | {"weight_block_size": [1, 16]}, "weight_block_size is [1, 16]"),
        (CONFIGS["modelopt mxfp8"] | {"group_size": 16}, "group_size is 16; supported is 32"),
        (CONFIGS["modelopt mixed"] | {"quantized_layers": {"m": {"quant_algo": "W4A8_AWQ"}}},
         "quantized_layers.m: quant_algo is 'W4A8_AWQ'"),
        (CONFIGS["modelopt mixed"] | {"quantized_layers": ["m"]}, "must be an object of objects"),
        (inputs_of("tokens", strategy="tensor"), "input_activations: strategy is 'tensor'; suppor"),
        (inputs_of("static", strategy="token"), "strategy is 'token'; supported is 'tensor'"),
        (inputs_of("mxfp8", group_size=16), "group_size is 16; supported is 32"),
    ],
)  # fmt: skip
def test_fields_that_are_not_supported_are_named(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        canonical(config, {})


PLAIN = stored(MODULE, weight=np.ones((4, 4), np.float32))
LISTS = [
    ("blocks", "modules_to_not_convert"),
    ("mxfp8", "ignore"),
    ("int4", "ignore"),
    ("modelopt fp8", "exclude_modules"),
    ("modelopt", "ignore"),
]


@pytest.mark.parametrize(("form", "key"), LISTS)
def test_a_plain_projection_that_a_list_does_not_name_is_an_error(form: str, key: str):
    with pytest.raises(ValueError, match=f"{MODULE}.weight is F32 .*: {key} does not name it: n"):
        canonical(CONFIGS[form] | {key: ["lm_head"]}, PLAIN)
    names = "model.layers.*.self_attn", "*self_attn*", "re:^model.*q_proj", "self_attn.q_proj"
    for entry in names:
        assert canonical(CONFIGS[form] | {key: ["lm_head", entry]}, PLAIN) == PLAIN
    assert canonical(CONFIGS[form], PLAIN) == PLAIN


def test_a_list_is_of_what_the_groups_target():
    config: dict[str, Any] = CONFIGS["int4"] | {"ignore": ["lm_head"]}
    [group] = config["config_groups"].values()
    groups = {"group_0": group | {"targets": ["re:.*mlp.*"]}}
    assert canonical(config | {"config_groups": groups}, PLAIN) == PLAIN


@pytest.mark.parametrize(("method", "more"), [("mxfp4", {}), ("awq", {"bits": 4, "group_size": 8})])
def test_lists_of_formats_of_integers_and_of_gpt_oss(method: str, more: dict[str, Any]):
    config = {"quant_method": method, "modules_to_not_convert": ["lm_head"], **more}
    with pytest.raises(ValueError, match="modules_to_not_convert does not name it"):
        canonical(config, PLAIN)


def test_mtp_layers_need_not_be_listed():
    """And what a list says of them is not about the model's layers of the same number."""
    config, module = CONFIGS["modelopt"], "mtp.layers.0.self_attn.q_proj"
    plain = stored(module, weight=np.ones((4, 4), np.float32))
    assert canonical(config | {"ignore": ["lm_head"]}, plain) == plain
    with pytest.raises(ValueError, match="ignore does not name it"):
        canonical(config | {"ignore": ["lm_head", "mtp.layers.0*"]}, PLAIN)


def test_a_file_may_name_an_algorithm_of_modelopt_alone():
    config = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}}
    parts = next(parts for form, parts, _ in CASES if form == "modelopt fp8")
    assert set(canonical(config, stored(MODULE, **parts))) == {
        f"{MODULE}.{part}" for part in ("values", "scale", "inputs")
    }


@pytest.mark.parametrize("entry", ["model.layers.0.feed_forward.w2", "re:.*w2$", "feed_forward.w2"])
def test_lists_have_the_names_of_the_file(entry: str):
    """As LFM2's, whose tensors are called otherwise here."""
    one = Stored("model.layers.0.feed_forward.w2.weight", np.ones((4, 4), np.float32), "F32")
    plain: dict[str, Any] = {"model.layers.0.mlp.down_proj.weight": one}
    config = CONFIGS["mxfp8"]
    assert canonical(config | {"ignore": ["lm_head", entry]}, plain) == plain
    with pytest.raises(ValueError, match=r"feed_forward.w2.weight is F32 .* ignore does not name"):
        canonical(config | {"ignore": ["lm_head"]}, plain)
