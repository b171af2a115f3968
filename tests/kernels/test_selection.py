"""Which operations run as kernels, by what the device can do and by name."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import add_rms_norm, rope_kv_write
from pallas_kernels.selection import MEASURED_SHARING, OPERATIONS, Kernels, is_hopper, kernel_module


@dataclasses.dataclass
class Device:
    device_kind: str
    compute_capability: str
    platform: str = "gpu"


HOPPERS = [
    Device("NVIDIA H100 80GB HBM3", "9.0"),
    Device("NVIDIA H100 PCIe", "9.0"),
    Device("NVIDIA H100 NVL", "9.0"),
    Device("NVIDIA H200", "9.0"),
    Device("NVIDIA GH200 480GB", "9.0"),
]
TPUS = [Device("TPU v5 lite", "", "tpu"), Device("TPU v6 lite", "", "tpu")]
OTHERS = [
    Device("TPU v4", "", "tpu"),  # no kernel was compiled for it
    Device("NVIDIA A100-SXM4-80GB", "8.0"),
    Device("NVIDIA B200", "10.0"),
    Device("AMD Instinct MI300X", "gfx942"),
    jax.devices("cpu")[0],
]
ALL = Kernels(frozenset(OPERATIONS))
FOR_EIGHT = Kernels(frozenset(OPERATIONS) - set(MEASURED_SHARING))
NEW = {"packed_float_product", "float8_group_layers"}
OF_ONE = {"packed_expert_product", "delta_inputs", "gated_norm"}
OF_ONE |= {"o_gate_up_down", "float8_layers", "expert_gate_up_down", "attention_sinks"}
AUTO = Kernels(frozenset(OPERATIONS) - NEW - {"reduce_add_rms_norm", "partial_attention"})
FOR_TWO = Kernels(frozenset(OPERATIONS) - NEW - OF_ONE)
FOR_FOUR = Kernels(
    frozenset(OPERATIONS)
    - NEW
    - OF_ONE
    - {"packed_product", "round_tokens", "delta_rule", "delta_run", "float8_pages"}
    - {"expert_product", "latent_attention"}
)


def kind(device: Any) -> str:
    return device.device_kind


@pytest.mark.parametrize("device", HOPPERS, ids=kind)
def test_every_hopper_gpu_runs_the_measured_kernels(device: Any):
    assert is_hopper(device)
    assert Kernels.for_device(device) == Kernels.parse("auto", device) == AUTO
    for sharing, measured in ((2, FOR_TWO), (4, FOR_FOUR)):
        found = Kernels.for_device(device, sharing)
        assert found == Kernels.parse("auto", device, sharing) == measured
    assert Kernels.parse("auto", device, 8) == FOR_EIGHT  # compiled, but never run
    assert Kernels.parse("all", device) == ALL
    assert Kernels.parse("none", device) == Kernels()


@pytest.mark.parametrize("device", OTHERS, ids=kind)
def test_no_other_device_runs_any(device: Any):
    assert not is_hopper(device)
    assert Kernels.for_device(device) == Kernels.parse("auto", device) == Kernels()
    assert Kernels.parse("none", device) == Kernels()
    for text in ("all", "top_k"):
        with pytest.raises(ValueError, match=f"for Hopper GPUs, not for {device.device_kind}"):
            Kernels.parse(text, device)


@pytest.mark.parametrize("device", TPUS, ids=kind)
def test_a_tpu_runs_attention_as_a_kernel(device: Any):
    kernels = Kernels.for_device(device)
    assert kernels == Kernels.parse("auto", device) == Kernels.parse("all", device)
    assert kernels == Kernels.parse("paged_attention", device) != Kernels()
    assert str(kernels) == "paged_attention" and kernels.backend == "mosaic_tpu"
    assert kernels.implementation("paged_attention") == "auto_tpu"
    assert kernels.implementation("top_k") == "reference"
    assert Kernels.parse("none", device) == Kernels()
    with pytest.raises(ValueError, match=r"no kernel for TPUs is called 'top_k': .*paged_att"):
        Kernels.parse("top_k", device)


def test_without_a_device_the_default_one_counts(monkeypatch: pytest.MonkeyPatch):
    cpu = jax.devices("cpu")[0]
    assert Kernels.for_device() == Kernels.parse("auto") == Kernels()
    monkeypatch.setattr(jax, "devices", lambda _: HOPPERS[:1])
    assert (Kernels.for_device(), Kernels.parse("all")) == (AUTO, ALL)
    with jax.default_device(cpu):
        assert Kernels.for_device() == Kernels()


def test_names_choose_operations():
    chosen = Kernels.parse("top_k, add_rms_norm", HOPPERS[0])
    assert chosen == Kernels(frozenset({"top_k", "add_rms_norm"}))
    assert "top_k" in chosen and "paged_attention" not in chosen
    assert chosen.implementation("top_k") == "auto"
    assert chosen.implementation("paged_attention") == "reference"
    assert str(chosen) == "add_rms_norm,top_k" and str(Kernels()) == "none"
    assert Kernels.parse(str(chosen), HOPPERS[0]) == chosen
    assert len({chosen, Kernels.parse("add_rms_norm,top_k", HOPPERS[0]), ALL}) == 2


def test_pages_of_bytes_need_a_choice_of_their_own():
    wide, narrow = jnp.zeros(1, jnp.bfloat16), jnp.zeros(1, jnp.uint8)
    for chosen, expected in ((AUTO, "auto"), (FOR_EIGHT, "reference"), (Kernels(), "reference")):
        assert chosen.over_pages("kv_compact", narrow) == expected
    assert FOR_EIGHT.over_pages("kv_compact", wide) == "auto"


@pytest.mark.parametrize("text", ["conv", "top_k,conv", "conv,all"])
def test_a_name_without_a_kernel_is_an_error_of_one_line(text: str):
    for device in (HOPPERS[0], OTHERS[-1]):
        with pytest.raises(ValueError, match=r"called '(conv|all)': .*kv_compact") as caught:
            Kernels.parse(text, device)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="'conv'"):
        Kernels(frozenset({"conv"}))
    with pytest.raises(ValueError, match="'conv'"):
        ALL.implementation("conv")


def test_a_form_needs_its_kernel():
    with pytest.raises(ValueError, match=r"^float8_layers is a form of o_gate_up_down: name both$"):
        Kernels.parse("top_k,float8_layers", HOPPERS[0])
    with pytest.raises(ValueError, match=r"float8_layers is a form of .*; float8_pages is "):
        Kernels.parse("float8_layers,float8_pages", HOPPERS[0])
    with pytest.raises(ValueError, match=r"^float8_pages is .* kv_compact: name one of those"):
        Kernels.parse("float8_pages,top_k", HOPPERS[0])
    for text in ("float8_layers,o_gate_up_down", "float8_pages,rope_kv_write"):
        assert text.split(",")[0] in Kernels.parse(text, HOPPERS[0])


def test_auto_is_the_kernel_wherever_the_arguments_fit():
    """On any device: "auto" looks at the arguments only, and the caller chooses by device."""
    assert kernel_module("top_k", "reference", None) is None
    assert kernel_module("top_k", "auto", "that") is None
    for implementation in ("auto", "mosaic_gpu"):
        module = kernel_module("top_k", implementation, None)
        assert module is not None and module.__name__ == "pallas_kernels.top_k.mosaic_gpu"
    for implementation in ("auto_tpu", "mosaic_tpu"):
        module = kernel_module("paged_attention", implementation, None)
        assert module is not None and module.__name__.endswith("paged_attention.mosaic_tpu")
    assert kernel_module("paged_attention", "auto_tpu", "that") is None
    for implementation in ("mosaic_gpu", "mosaic_tpu"):
        with pytest.raises(ValueError, match="the kernel cannot take that"):
            kernel_module("paged_attention", implementation, "that")


def test_kernels_say_which_products_they_take_as_partial_sums():
    assert add_rms_norm.takes_partials(jnp.bfloat16, 4096)
    assert add_rms_norm.takes_partials("bfloat16", 16384)
    assert not add_rms_norm.takes_partials(jnp.bfloat16, 16640)
    assert not add_rms_norm.takes_partials(jnp.bfloat16, 100)
    assert not add_rms_norm.takes_partials(jnp.float32, 4096)
    assert rope_kv_write.takes_partials(jnp.bfloat16, 128)
    assert not rope_kv_write.takes_partials(jnp.bfloat16, 64)
    assert not rope_kv_write.takes_partials(jnp.float32, 128)


def test_importing_jaxspec_does_not_load_mosaic():
    """Importing Mosaic takes nearly as long as the rest, and only a running kernel needs it."""
    code = "import jaxspec, sys; print('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == "False"
