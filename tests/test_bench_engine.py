"""Timing of the engine on a tiny model; the figures are for a GPU."""

import pytest

from jaxspec.commands import bench_engine
from tests.json_lines import joined
from tests.marks import slow

TINY = ["--shape", "tiny", "--context", "20", "--page-size", "16", "--dtype", "float32"]


@pytest.mark.parametrize("sampling", [slow("greedy"), slow("all")])
def test_every_mode_is_timed_beside_its_floor(sampling, capsys):
    modes = ["--layers", "2", "--modes", "plain,tree:3:1:2@2", "--batch", "2"]
    counts = ["--repeats", "2", "--new-tokens", "6", "--sampling", sampling]
    assert bench_engine.main([*TINY, *modes, *counts, "--json"]) == 0
    printed = capsys.readouterr()
    results = joined(printed.out, "timings")
    assert results["own_kernels"] == "none"
    assert len(results["config"]["layers"]) == 2 and "tiny, 2 layers, float32" in printed.err
    assert f"sampling: {sampling}; kernels: none" in printed.err
    timings = results["timings"]
    assert [row["mode"] for row in timings] == ["plain", "tree:3:1:2@2"]
    for row in timings:
        assert row["first_context"] == 20 and len(row["all_round_ms"]) == 2
        assert row["floor_ms"] > 0 and row["compile_seconds"] > 0
        assert row["last_context"] == 26
        committed = 2 * row["acceptance_length"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * committed / row["round_ms"])
        assert f"compiled {row['mode']}, batch 2, in" in printed.err
    assert [row["rounds"] for row in timings] == [6, 3]
    assert [row["acceptance_length"] for row in timings] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "plain,chain"], "not plain, chain:K"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--batch", "1,0"], "must be at least 1"),
        (["--new-tokens", "0"], "must be at least 1"),
        (["--repeats", "0"], "must be at least 1"),
        (["--kernels", "all"], "the kernels are for Hopper GPUs"),
        (["--kernels", "tok_k"], "no kernel is called 'tok_k'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert bench_engine.main([*TINY, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("jaxspec bench engine: ") and message in line
