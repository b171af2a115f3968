"""Where kernels run, and how attention divides its work."""

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.tuning import KERNELS_VARIABLE, MEASURED, attention_tuning, use_kernel


@pytest.fixture(autouse=True)
def forget():
    use_kernel.cache_clear()
    yield
    use_kernel.cache_clear()


def test_a_cpu_runs_references_without_a_word(caplog: pytest.LogCaptureFixture):
    assert not any(use_kernel(operation) for operation in MEASURED)
    assert not caplog.records


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("all", {*MEASURED}), ("none", set()), ("add_rms_norm", {"add_rms_norm"})],
)
def test_the_environment_chooses(chosen: str, expected: set, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KERNELS_VARIABLE, chosen)
    assert {operation for operation in MEASURED if use_kernel(operation)} == expected


def test_a_name_without_a_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "add_rms_norm,conv")
    with pytest.raises(ValueError, match="no kernel is called 'conv'"):
        use_kernel("add_rms_norm")


def test_an_unmeasured_gpu_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Device:
        platform, device_kind = "gpu", "NVIDIA Something"

    monkeypatch.setattr(tuning, "MEASURED", {"paged_attention": ("NVIDIA H100 80GB HBM3",)})
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert not use_kernel("paged_attention")
    assert not use_kernel("paged_attention")
    (record,) = caplog.records
    assert "not measured on NVIDIA Something" in record.getMessage()


@pytest.mark.parametrize("pairs", [1, 8, 16, 64, 256, 1024])
@pytest.mark.parametrize("slots", [64, 256, 8192])
def test_splits_keep_every_block_resident_and_busy(pairs: int, slots: int):
    for row_tiles in (1, 2, 4):
        chosen = attention_tuning(pairs, row_tiles, slots)
        assert chosen.splits in (1, 2, 4, 8)
        assert chosen.splits == 1 or pairs * chosen.splits <= tuning.MULTIPROCESSORS
        assert chosen.splits <= max(slots // chosen.block, 1)
