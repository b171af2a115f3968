"""Zero points of integers that the config calls symmetric: those of the middle change nothing, and
others are named."""

from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoints.formats import canonical
from tests.checkpoints.formats.test_four_bits import Stored
from tests.helpers.quantized_checkpoints import words

MODULE = "model.layers.0.self_attn.q_proj"
OUTPUTS, INPUTS, GROUP = 20, 64, 32
DTYPES = {"int32": "I32", "int64": "I64", "float32": "F32", "int8": "I8", "uint8": "U8"}
SHAPE = (OUTPUTS, INPUTS // GROUP)


def stored(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    names = {f"{MODULE}.{end}": array for end, array in arrays.items()}
    return {name: Stored(name, one, DTYPES[one.dtype.name]) for name, one in names.items()}


def compressed(bits: int, zeros: np.ndarray | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module of compressed-tensors with these zero points, and its config."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True}}
    config = {"format": "pack-quantized", "config_groups": {"group_0": group}}
    values = np.random.default_rng(0).integers(0, 2**bits, (OUTPUTS, INPUTS))
    arrays = {
        "weight_packed": words(values, bits),
        "weight_scale": np.ones(SHAPE, np.float32),
        "weight_shape": np.array([OUTPUTS, INPUTS]),
    }
    arrays |= {} if zeros is None else {"weight_zero_point": zeros}
    return config | {"quant_method": "compressed-tensors"}, stored(arrays)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """As compressed-tensors packs zero points, along the outputs."""
    return np.ascontiguousarray(words(numbers.T, bits).T)


def middles(bits: int) -> list[np.ndarray]:
    """Ways of storing that all zeros are the middle."""
    middle = np.full(SHAPE, 2 ** (bits - 1))
    return [
        packed(middle, bits),  # the last word is not full
        middle.astype(np.uint8),
        np.zeros(SHAPE, np.int8),
        np.zeros_like(packed(middle, bits)),
    ]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("way", range(4))
def test_zeros_of_the_middle_change_nothing(bits: int, way: int):
    config, without = compressed(bits, None)
    expected = canonical(config, without)
    found = canonical(config, compressed(bits, middles(bits)[way])[1])
    assert found.keys() == expected.keys() == {f"{MODULE}.values", f"{MODULE}.scale"}
    for name, one in expected.items():
        np.testing.assert_array_equal(found[name].read(), one.read())


@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_zeros_are_zero_points_where_the_config_is_not_symmetric(bits: int):
    """The lowest ones, as of weights that are all above zero. They are taken for none only where
    the config says that there are none."""
    config, tensors = compressed(bits, packed(np.zeros(SHAPE, np.int64), bits))
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    zero = canonical(config, tensors)[f"{MODULE}.zero"]
    np.testing.assert_array_equal(zero.read(), np.full(SHAPE, -(2.0 ** (bits - 1))))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["packed", "uint8"])
def test_other_zeros_are_named(bits: int, dtype: str):
    zeros = np.full(SHAPE, 2 ** (bits - 1))
    zeros[OUTPUTS - 1, 1] += 1
    array = packed(zeros, bits) if dtype == "packed" else zeros.astype(dtype)
    with pytest.raises(ValueError, match="weight_zero_point has zero points other than the middle"):
        canonical(*compressed(bits, array))


def gptq(
    zero: int, *, version: int, symmetric: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    zeros = np.full(SHAPE[::-1], zero - (version == 1))
    arrays = {
        "qweight": words(np.full((OUTPUTS, INPUTS), 3), 4).T.copy(),
        "qzeros": words(np.pad(zeros, [(0, 0), (0, 4)], constant_values=zero - (version == 1)), 4),
        "scales": np.ones((SHAPE[1], OUTPUTS + 4), np.float32),
    }
    arrays["qweight"] = np.pad(arrays["qweight"], [(0, 0), (0, 4)])
    name = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": name}
    return config | {"sym": symmetric}, stored(arrays)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_has_zeros_of_the_middle_and_no_others(version: int):
    found = canonical(*gptq(8, version=version))
    assert found.keys() == {f"{MODULE}.values", f"{MODULE}.scale"}
    with pytest.raises(ValueError, match=r"zeros other than the middle, but .* sym: true"):
        canonical(*gptq(10, version=version))


def awq(zero: int, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {
        "qweight": words(np.full((INPUTS, 24), 3), 4),
        "qzeros": words(np.full((INPUTS // GROUP, 24), zero), 4),
        "scales": np.ones((INPUTS // GROUP, 24), np.float32),
    }
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP} | fields, stored(arrays)


def test_awq_may_be_symmetric():
    """Then zeros are the middle."""
    assert f"{MODULE}.zero" in canonical(*awq(8))
    found = canonical(*awq(8, zero_point=False))
    assert found.keys() == {f"{MODULE}.values", f"{MODULE}.scale"}
    np.testing.assert_array_equal(found[f"{MODULE}.values"].read(), np.full((24, INPUTS), -5))
    with pytest.raises(ValueError, match=r"zeros other than the middle, but .* zero_point: false"):
        canonical(*awq(7, zero_point=False))
