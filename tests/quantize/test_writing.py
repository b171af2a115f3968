"""Files of every format, field by field as the formats are described."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxspec.quantize import writing
from jaxspec.quantize.gptq import GptqConfig, Order
from jaxspec.quantize.methods import Method
from jaxspec.quantize.rounding import Grid, Rounded, round_to_float8
from jaxspec.quantize.writing import (
    FormatName,
    QuantizationPlan,
    check_plan,
    module_tensors,
    write_checkpoint,
)

OUTPUTS, SIZE, GROUP = 24, 32, 8


def plan_of(
    name: FormatName, method: Method = "rtn", bits: int = 4, order: Order = "inputs", **options: Any
) -> QuantizationPlan:
    grid = Grid(bits, options.pop("group", GROUP), options.pop("symmetric", False))
    return QuantizationPlan(
        method, grid, GptqConfig(order), name, options.pop("lm_head", False), **options
    )


def random_module(bits: int = 4, *, zeros: bool = True, mixed: bool = False) -> Rounded:
    """Every value and every zero occurs."""
    rng, half, shape = np.random.default_rng(0), 2 ** (bits - 1), (OUTPUTS, SIZE // GROUP)
    groups = rng.permutation(np.arange(SIZE) // GROUP).astype(np.int32)
    return Rounded(
        jnp.asarray(rng.integers(-half, half, (OUTPUTS, SIZE)), jnp.int8),
        jnp.asarray(rng.uniform(0.01, 1, shape), jnp.float16),
        jnp.asarray(rng.integers(-half, half, shape), jnp.int8) if zeros else None,
        jnp.asarray(groups) if mixed else None,
    )


def bits_of(word: Any, first: int, count: int) -> int:
    """``count`` bits of an int32, from bit ``first``; bit 0 is the lowest."""
    return (int(word) % 2**32 >> first) % 2**count


def test_awq_packs_outputs_in_its_own_order():
    module = random_module()
    found = module_tensors("m", module, plan_of("awq"))
    words, zeros = found["m.qweight"], found["m.qzeros"]
    assert words.dtype == zeros.dtype == np.int32 and found["m.scales"].dtype == np.float16
    assert words.shape == (SIZE, OUTPUTS // 8) and zeros.shape == (SIZE // GROUP, OUTPUTS // 8)
    np.testing.assert_array_equal(found["m.scales"], np.asarray(module.scale).T)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        for word in range(OUTPUTS // 8):
            output = 8 * word + column
            for k in range(SIZE):
                stored = bits_of(words[k, word], 4 * nibble, 4)
                assert stored == module.values[output, k] + 8
            for group in range(SIZE // GROUP):
                assert module.zero is not None
                stored = bits_of(zeros[group, word], 4 * nibble, 4)
                assert stored == module.zero[output, group] + 8


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_packs_inputs_and_stores_zeros_less_one(bits: int):
    module, count, half = random_module(bits, mixed=True), 32 // bits, 2 ** (bits - 1)
    found = module_tensors("m", module, plan_of("gptq", bits=bits))
    words, zeros = found["m.qweight"], found["m.qzeros"]
    assert words.shape == (SIZE // count, OUTPUTS) and words.dtype == np.int32
    assert zeros.shape == (SIZE // GROUP, OUTPUTS // count)
    np.testing.assert_array_equal(found["m.g_idx"], module.groups)
    np.testing.assert_array_equal(found["m.scales"], np.asarray(module.scale).T)
    assert found["m.g_idx"].dtype == np.int32 and module.zero is not None
    for output in range(OUTPUTS):
        for k in range(SIZE):
            stored = bits_of(words[k // count, output], k % count * bits, bits)
            assert stored == module.values[output, k] + half
        for group in range(SIZE // GROUP):
            stored = bits_of(zeros[group, output // count], output % count * bits, bits)
            assert (stored + 1) % 2**bits == module.zero[output, group] + half


def test_gptq_lists_groups_that_are_not_mixed_and_zeros_that_are_none():
    found = module_tensors("m", random_module(zeros=False), plan_of("gptq"))
    np.testing.assert_array_equal(found["m.g_idx"], np.arange(SIZE) // GROUP)
    assert set(found["m.qzeros"].ravel()) == {0x77777777}


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_packs_inputs_of_each_output(bits: int):
    module, count, half = random_module(bits), 32 // bits, 2 ** (bits - 1)
    found = module_tensors("m", module, plan_of("compressed-tensors", bits=bits))
    words, zeros = found["m.weight_packed"], found["m.weight_zero_point"]
    assert words.shape == (OUTPUTS, SIZE // count)
    assert zeros.shape == (OUTPUTS // count, SIZE // GROUP)
    assert found["m.weight_shape"].tolist() == [OUTPUTS, SIZE]
    assert found["m.weight_shape"].dtype == np.int64 and module.zero is not None
    np.testing.assert_array_equal(found["m.weight_scale"], module.scale)
    for output in range(OUTPUTS):
        for k in range(SIZE):
            stored = bits_of(words[output, k // count], k % count * bits, bits)
            assert stored == module.values[output, k] + half
        for group in range(SIZE // GROUP):
            stored = bits_of(zeros[output // count, group], output % count * bits, bits)
            assert stored == module.zero[output, group] + half
    symmetric = module_tensors("m", random_module(zeros=False), plan_of("compressed-tensors"))
    assert set(symmetric) == {"m.weight_packed", "m.weight_scale", "m.weight_shape"}


def test_floats_are_stored_as_they_are():
    module = round_to_float8(jnp.asarray(np.random.default_rng(0).normal(size=(4, 8))))
    plan = plan_of("compressed-tensors", "fp8")
    found = module_tensors("m", module, plan)
    assert found["m.weight"].dtype == jnp.float8_e4m3fn and found["m.weight_scale"].shape == (4, 1)
    config: Any = writing.quantization_config(plan)
    assert config["format"] == "float-quantized"
    [group] = config["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    assert (weights["type"], weights["strategy"], weights["dynamic"]) == ("float", "channel", False)
    assert (inputs["type"], inputs["strategy"], inputs["dynamic"]) == ("float", "token", True)


def test_rounded_activations_are_said_and_change_no_tensor():
    plans = [
        plan_of("compressed-tensors", symmetric=True, activations=own) for own in (None, "fp8")
    ]
    plain, rounds = (module_tensors("m", random_module(zeros=False), plan) for plan in plans)
    assert plain.keys() == rounds.keys()
    assert all((plain[name] == rounds[name]).all() for name in plain)
    configs: list[Any] = [writing.quantization_config(plan) for plan in plans]
    groups = [config["config_groups"]["group_0"] for config in configs]
    inputs = groups[1].pop("input_activations")
    wanted = {"num_bits": 8, "type": "float", "strategy": "token", "group_size": None}
    wanted |= {"dynamic": True, "symmetric": True}
    assert inputs | wanted == inputs
    assert groups[1].pop("format") == "pack-quantized"
    assert groups[0].pop("input_activations") is None and configs[0] == configs[1]
    assert configs[0]["format"] == "pack-quantized"


def test_several_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 100)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "README.md", "model.safetensors", "config.json", "x.bin"):
        (source / name).write_text("{}")
    tensors = {f"t{i}": np.full(16, i, np.float32) for i in range(4)}
    parts = ({name: tensor} for name, tensor in tensors.items())
    out = tmp_path / "out"
    write_checkpoint(source, {"model_type": "llama"}, parts, plan_of("awq"), out)
    weights = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    index = "model.safetensors.index.json"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["config.json", "tokenizer.json", index, *weights]
    )
    where = json.loads((out / index).read_text())
    assert where["metadata"]["total_size"] == 256
    for name, tensor in tensors.items():
        with safe_open(out / where["weight_map"][name], "numpy") as file:
            np.testing.assert_array_equal(file.get_tensor(name), tensor)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["group_size"] == 8


@pytest.mark.parametrize(
    ("plan", "shape", "message"),
    [
        (plan_of("awq", bits=8), (32, 32), "format awq holds 4 bits, not 8"),
        (plan_of("gptq", bits=3), (32, 32), "format gptq holds 4 or 8 bits, not 3; dense holds"),
        (plan_of("dense", bits=9), (32, 32), "not 9"),
        (plan_of("awq", "gptq", order="mixed"), (32, 32), "format awq has no mixed groups"),
        (plan_of("compressed-tensors", "gptq", order="mixed"), (32, 32), "has no mixed groups"),
        (plan_of("awq", lm_head=True), (32, 32), "format awq leaves the LM head"),
        (plan_of("awq", "fp8"), (32, 32), "format awq has no 8-bit floats"),
        (plan_of("gptq", symmetric=True, activations="fp8"), (32, 32), "gptq has no rounded activ"),
        (plan_of("compressed-tensors", activations="fp8"), (32, 32), "need symmetric weights of 4"),
        (plan_of("compressed-tensors", bits=8, symmetric=True, activations="fp8"), (32, 32),
         "need symmetric weights of 4 bits: take --bits 4 --symmetric"),
        (plan_of("compressed-tensors", "fp8", activations="fp8"), (32, 32), "fp8 rounds activatio"),
        (plan_of("awq"), (32, 36), "m: a group of 8 does not divide 36 inputs"),
        (plan_of("awq"), (36, 32), "m is .36, 32.: format awq packs 8 integers of 4 bits"),
        (plan_of("gptq", group=None), (32, 36), "m is .32, 36.: format gptq packs 8 integers"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused(
    plan: QuantizationPlan, shape: tuple[int, int], message: str
):
    with pytest.raises(ValueError, match=message):
        check_plan(plan, {"m": shape})


def test_groups_that_work_are_proposed():
    """The widths of SmolLM-135M: 576 inputs of all projections but one."""
    shapes = {"q_proj": (576, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}
    with pytest.raises(ValueError) as caught:
        check_plan(plan_of("gptq", group=128), shapes)
    assert str(caught.value) == (
        "q_proj: a group of 128 does not divide 576 inputs. Groups that divide all inputs: "
        "64, 32, 16, 8, -1 (all of them)"
    )
    check_plan(plan_of("gptq", group=64), shapes)
    with pytest.raises(ValueError, match=r"^q_proj: .* 576 inputs; down_proj: .* 1536 inputs\."):
        check_plan(plan_of("gptq", group=1000), shapes)


def test_other_formats_fill_the_last_word():
    for plan in (plan_of("dense", bits=3), plan_of("compressed-tensors"), plan_of("dense", "fp8")):
        check_plan(plan, {"m": (35, 40)})
    module = random_module()
    assert module.zero is not None
    odd = Rounded(module.values[:21], module.scale[:21], module.zero[:21])
    found = module_tensors("m", odd, plan_of("compressed-tensors"))
    assert found["m.weight_zero_point"].shape == (3, SIZE // GROUP)
    assert bits_of(found["m.weight_zero_point"][2, 1], 16, 4) == module.zero[20, 1] + 8
    assert bits_of(found["m.weight_zero_point"][2, 1], 20, 12) == 0
