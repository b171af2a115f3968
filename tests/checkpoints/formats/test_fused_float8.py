"""Tensors of all experts in 8-bit floats, and files whose parts do not agree."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoints.formats.float8 import read_float8
from tests.checkpoints.formats.test_float8_experts import CONFIG, EXPERT, InMemory, codes, module


def of_all_experts(scale: str = "_scale_inv", outputs: int = 256) -> dict[str, InMemory]:
    """Three experts of 192 inputs in one tensor for each projection, and its scales in another."""
    rng, block = np.random.default_rng(3), "model.layers.3.mlp.experts"
    sizes = {"gate_up_proj": (outputs, 192), "down_proj": (192, outputs // 2)}
    arrays: dict[str, Any] = {}
    for kind, size in sizes.items():
        grid = tuple(-(-n // 128) for n in size)
        arrays[kind] = codes(rng, 3, *size).view(ml_dtypes.float8_e4m3fn)
        arrays[kind + scale] = rng.uniform(0.5, 2.0, (3, *grid)).astype(np.float32)
    dtypes = {"float8_e4m3fn": "F8_E4M3", "float32": "F32"}
    return {
        f"{block}.{name}": InMemory(f"{block}.{name}", array, dtypes[array.dtype.name])
        for name, array in arrays.items()
    }


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_tensors_of_all_experts_are_those_of_each(suffix: str):
    stored = of_all_experts(suffix)
    read = read_float8(CONFIG, stored)
    block = "model.layers.3.mlp.experts"
    values, scales = (stored[f"{block}.gate_up_proj{end}"].values for end in ("", suffix))
    down, down_scales = (stored[f"{block}.down_proj{end}"].values for end in ("", suffix))
    wanted = {
        "gate_proj": (values[:, :128], scales[:, :1]),
        "up_proj": (values[:, 128:], scales[:, 1:]),
    }
    wanted["down_proj"] = down, down_scales
    assert len(read) == 3 * 3 * 2
    for expert in range(3):
        for projection, (of_values, of_scales) in wanted.items():
            module = f"{block}.{expert}.{projection}"
            found = read[f"{module}.values"].read().view(np.uint8)
            np.testing.assert_array_equal(found, of_values[expert].view(np.uint8))
            np.testing.assert_array_equal(read[f"{module}.blocks"].read(), of_scales[expert])


def test_tensors_of_all_experts_that_do_not_fit_are_named():
    stored = of_all_experts()
    name = "model.layers.3.mlp.experts.down_proj_scale_inv"
    short = stored | {
        name: dataclasses.replace(stored[name], values=np.ones((3, 1, 1), np.float32))
    }
    whole = CONFIG | {"weight_block_size": None}
    for config, tensors, message in (
        (CONFIG, short, r"down_proj_scale_inv is .*\[3, 1, 1\], but must be \[3, 2, 1\]"),
        (
            CONFIG,
            of_all_experts(outputs=320),
            "gate_up_proj has 320 outputs of gate and up, whose",
        ),
        (
            CONFIG,
            {n: x for n, x in stored.items() if n != name},
            "down_proj is F8_E4M3, but its sc",
        ),
        (whole, stored, r"weight_block_size must be \[128, 128\] for it, not None"),
    ):
        with pytest.raises(ValueError, match=message):
            read_float8(config, tensors)


def test_scales_by_two_names_are_named():
    stored = module(EXPERT, 160, 192, weight_scale=np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match=f"{EXPERT} has weight_scale_inv and weight_scale: keep"):
        read_float8(CONFIG, stored)


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3"])
def test_a_weight_of_8_bits_without_scales_is_named(dtype: str):
    name = f"{EXPERT}.weight"
    stored = {name: InMemory(name, np.ones((16, 32), np.uint8), dtype)}
    with pytest.raises(ValueError, match=f"{name} is {dtype}, but the scales of {EXPERT} are mis"):
        read_float8(CONFIG, stored)
