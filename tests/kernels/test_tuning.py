"""Where kernels run, and how attention divides its work."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.tuning import (
    KERNELS_VARIABLE,
    MEASURED,
    AttentionTuning,
    attention_tuning,
    parts_of_product,
    top_k_shares,
    use_kernel,
    warn_unmeasured,
)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    warn_unmeasured.cache_clear()


@dataclasses.dataclass
class Device:
    device_kind: str
    compute_capability: str
    platform: str = "gpu"


def test_a_cpu_runs_references_without_a_word(caplog: pytest.LogCaptureFixture):
    assert not any(use_kernel(operation) for operation in MEASURED)
    assert not caplog.records


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("all", {*MEASURED}), ("none", set()), ("add_rms_norm", {"add_rms_norm"})],
)
def test_the_environment_chooses(chosen: str, expected: set, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda _: [Device("NVIDIA H100 PCIe", "9.0")])
    monkeypatch.setenv(KERNELS_VARIABLE, chosen)
    assert {operation for operation in MEASURED if use_kernel(operation)} == expected


def test_an_h100_runs_all_kernels_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    h100, cpu = Device("NVIDIA H100 80GB HBM3", "9.0"), jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "devices", lambda _: [h100])
    assert all(use_kernel(operation) for operation in MEASURED)
    with jax.default_device(cpu):
        assert not any(use_kernel(operation) for operation in MEASURED)
    assert not caplog.records


def test_a_name_without_a_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "add_rms_norm,conv")
    with pytest.raises(ValueError, match="no kernel is called 'conv'"):
        use_kernel("add_rms_norm")


def test_kernels_asked_for_where_they_cannot_run_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "all")
    with pytest.raises(ValueError, match="for Hopper GPUs, not for cpu"):
        use_kernel("add_rms_norm")
    monkeypatch.setattr(jax, "devices", lambda _: [Device("NVIDIA A100", "8.0")])
    with pytest.raises(ValueError, match="not for NVIDIA A100"):
        use_kernel("add_rms_norm")


def test_an_unmeasured_gpu_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(jax, "devices", lambda _: [Device("NVIDIA Something", "8.0")])
    assert not use_kernel("paged_attention")
    assert not use_kernel("paged_attention")
    (record,) = caplog.records
    assert "not measured on NVIDIA Something" in record.getMessage()


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("slots", [64, 256, 8192])
def test_splits_keep_every_block_resident_and_busy(batch: int, kv_heads: int, slots: int):
    for row_tiles in (1, 2, 4):
        chosen = attention_tuning(batch, kv_heads, row_tiles, slots, page_size=64)
        assert kv_heads % chosen.heads == 0
        assert chosen.splits in (1, 2, 4, 8)
        assert chosen.registers is None or chosen.producer_registers >= 24
        assert chosen.splits == 1 or batch * kv_heads * chosen.splits <= tuning.MULTIPROCESSORS
        assert chosen.splits <= 2 or batch * kv_heads * chosen.splits <= 66, "clusters need room"
        assert chosen.splits <= max(slots // chosen.block, 1)


@pytest.mark.parametrize(
    ("rows", "depth", "width", "parts"),
    [
        *((6, 4096, 4096, 4), (6, 4096, 6144, 4), (6, 4096, 28672, 1)),
        *((80, 4096, 4096, 4), (192, 4096, 6144, 2), (192, 4096, 28672, 1)),
        *((5, 14336, 4096, 4), (6, 14336, 4096, 8), (64, 14336, 4096, 8), (80, 14336, 4096, 4)),
        *((6, 28672, 8192, 2), (6, 12288, 4096, 4), (6, 8192, 6144, 4)),
        *((480, 4096, 4096, 1), (6, 512, 4096, 4), (6, 100, 4096, 1)),
    ],
)
def test_narrow_products_are_divided_for_a_kernel(
    rows: int, depth: int, width: int, parts: int, monkeypatch: pytest.MonkeyPatch
):
    assert parts_of_product("add_rms_norm", rows, depth, width) == 1, "no kernel adds up the parts"
    monkeypatch.setattr(tuning, "use_kernel", lambda operation: True)
    assert parts_of_product("add_rms_norm", rows, depth, width) == parts


def test_two_heads_share_a_block_only_where_pairs_outnumber_the_multiprocessors():
    assert attention_tuning(32, 8, 1, 8192, 64).heads == 2
    assert attention_tuning(8, 8, 1, 8192, 64).heads == 1
    assert attention_tuning(200, 1, 1, 8192, 64).heads == 1


def test_warpgroups_take_turns_with_pages_that_come_fast_enough():
    assert attention_tuning(8, 8, 4, 8192, 64).turns
    assert not attention_tuning(8, 8, 4, 8192, 16).turns
    assert not attention_tuning(8, 8, 1, 8192, 64).turns
    for warpgroups, heads in ((1, 1), (1, 2), (2, 2)):
        with pytest.raises(ValueError, match="two warpgroups of one head"):
            AttentionTuning(64, 2, warpgroups=warpgroups, heads=heads, turns=True)


@pytest.mark.parametrize("size", [128, 4096, 4224, 32_000, 65_536])
def test_a_row_is_shared_so_that_registers_hold_it(size: int):
    shares = top_k_shares(size)
    assert shares in (1, 2, 4, 8) and size / shares <= 8192
    assert shares == 1 or size / shares > 2048


def test_threads_cannot_ask_for_more_registers_than_there_are():
    """3 warpgroups start with 168 a thread; those who wait for more would never run."""
    assert AttentionTuning(128, 2, warpgroups=2, registers=240).producer_registers == 24
    with pytest.raises(ValueError, match="leave 8 to the producer: it needs 24"):
        AttentionTuning(128, 2, warpgroups=2, registers=248)


def test_importing_jaxspec_does_not_load_mosaic():
    """It takes nearly as long as everything else, and only a kernel that runs needs it."""
    code = "import jaxspec, sys; print('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == "False"
