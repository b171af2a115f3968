"""Timing of the engine on a tiny model; the figures are for a GPU."""

import pytest

from jaxspec.commands.bench import engine as bench_engine
from tests.helpers.json_lines import joined
from tests.helpers.marks import slow

TINY = ["--shape", "tiny", "--context", "20", "--page-size", "16", "--dtype", "float32"]


@pytest.mark.parametrize("sampling", [slow("greedy"), slow("all")])
def test_every_mode_is_timed_beside_its_floor(sampling, capsys):
    modes = ["--layers", "2", "--modes", "plain,tree:3:1:2@2", "--batch", "2"]
    counts = ["--repeats", "2", "--new-tokens", "6", "--sampling", sampling]
    assert bench_engine.main([*TINY, *modes, *counts, "--json"]) == 0
    printed = capsys.readouterr()
    results = joined(printed.out, "timings")
    assert results["pallas_kernels"] == "none"
    assert printed.out.count('"config"') == 1, "with the first timing alone"
    [layer] = results["config"]["layers"]
    assert layer["indices"] == [0, 1] and layer["mixer"]["num_heads"] == 8
    assert "tiny, 2 layers, float32" in printed.err
    assert f"sampling: {sampling}; kernels: none" in printed.err
    timings = results["timings"]
    assert [row["mode"] for row in timings] == ["plain", "tree:3:1:2@2"]
    for row in timings:
        assert row["first_context"] == 20 and len(row["all_round_ms"]) == 2
        assert row["floor_ms"] > 0 and row["compile_seconds"] > 0
        assert row["last_context"] == 26
        committed = 2 * row["acceptance_length"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * committed / row["round_ms"])
        assert f"/2 {row['mode']}, batch 2" in printed.err
    assert [row["rounds"] for row in timings] == [6, 3]
    assert [row["acceptance_length"] for row in timings] == [1, 2]


@pytest.mark.slow
def test_long_contexts_are_timed_without_reading_them(capsys):
    """Quick guards: those of random caches, and of contexts that do not fit."""
    long = ["--layers", "2", "--context", "40,200", "--chunk", "16", "--random-cache"]
    counts = ["--modes", "plain,chain:3@2", "--new-tokens", "8", "--repeats", "1", "--json"]
    assert bench_engine.main([*TINY, *long, *counts]) == 0
    printed = capsys.readouterr()
    assert "prefill: of the last chunk of each prompt" in printed.err
    timings = joined(printed.out, "timings")["timings"]
    assert [row["first_context"] for row in timings] == [40, 40, 200, 200]
    assert [row["last_context"] for row in timings] == [48, 48, 208, 208]
    assert {row["prefill_tokens"] for row in timings} == {16}
    assert timings[2]["floor"]["target_kv"] > 4 * timings[0]["floor"]["target_kv"]


def test_contexts_that_do_not_fit_are_named_in_one_error(capsys):
    assert bench_engine.main(["--context", "512,131072,200000", "--modes", "plain"]) == 2
    error = capsys.readouterr().err
    assert "--context 131072 needs" in error and "--context 200000 needs" in error
    assert "--context 512" not in error


@pytest.mark.slow
def test_experts_that_are_read_are_counted(capsys):
    experts = ["--shape", "tiny-experts", "--layers", "2", "--draft-head", "mtp"]
    counts = ["--modes", "plain,chain:3@2", "--repeats", "1", "--new-tokens", "6", "--json"]
    assert bench_engine.main([*TINY, *experts, *counts]) == 0
    printed = capsys.readouterr()
    plain, chain = joined(printed.out, "timings")["timings"]
    assert plain["chosen"] == {"target": [2, 2], "draft": []}, "one token, 2 of 8 experts"
    assert plain["experts_read"] == 2 and plain["expected"] == pytest.approx(2)
    assert len(chain["chosen"]["target"]) == 2 and len(chain["chosen"]["draft"]) == 3
    assert 2 <= chain["experts_read"] <= 8
    assert chain["expected"] == pytest.approx(8 * (1 - (1 - 2 / 8) ** 4))
    assert chain["floor"]["target_weights"] > plain["floor"]["target_weights"]
    assert "experts" in printed.err


WIDE = ["--shape", "tiny-wide", "--layers", "1", "--context", "20", "--page-size", "16"]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("quantization", [None, "w4a16", "nvfp4", "fp8"])
def test_a_model_over_several_devices_is_timed(quantization: str | None, tp: int, capsys):
    scheme = [] if quantization is None else ["--quantization", quantization]
    counts = ["--batch", "1,8", "--repeats", "1", "--new-tokens", "6"]
    modes = ["--modes", "plain,tree:9:3:4@2"]
    assert bench_engine.main([*WIDE, *modes, *counts, *scheme, "--tp", str(tp), "--json"]) == 0
    printed = capsys.readouterr()
    timings = joined(printed.out, "timings")["timings"]
    assert f"tp {tp}" in printed.err
    assert [(row["mode"], row["batch"]) for row in timings] == [
        *(("plain", 1), ("tree:9:3:4@2", 1), ("plain", 8), ("tree:9:3:4@2", 8))
    ]
    layer = 128 * 64 * (2 * 16 + 2 * 8) + 3 * 128 * 1024
    bytes_each = {None: 2.0, "w4a16": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16, "fp8": 1.0}[
        quantization
    ]
    outputs = 64 * (16 + 2 * 8) + 2 * 1024 + 2 * 128
    factors = 4 * outputs if quantization == "nvfp4" else 0
    expected = (layer * bytes_each + factors + 128 * 1000 * 2) / tp  # the LM head has 16 bits
    assert timings[0]["floor"]["target_weights"] == pytest.approx(expected, rel=0.03)  # and norms
