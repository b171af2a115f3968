"""The profile of a round, on a CPU."""

import json
from pathlib import Path

import pytest

from jaxspec.commands import profile_round

TINY = ["--shape", "tiny", "--context", "32", "--page-size", "16", "--dtype", "float32"]


# jaxlib's type of event statistics lacks the attribute.
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("devices", [(), ("--tp", "2", "--sp", "2")], ids=str)
def test_a_round_is_split_into_its_phases(devices, tmp_path: Path, capsys):
    plot = tmp_path / "round.png"
    arguments = [*TINY, "--layers", "2", "--mode", "tree:3:1:2@1.5", "--rounds", "3"]
    arguments += ["--plot", str(plot), "--json"]
    assert profile_round.main([*arguments, *devices]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert results["profiled_rounds"] == 4
    rows = {(row["phase"], row["part"]): row for row in results["scopes"]}
    assert {phase for phase, _ in rows} >= {"draft", "verify", "accept", "compact"}
    for phase in ("draft", "verify"):
        for part in ("qkv", "attention", "kv_write", "o", "mlp", "norm", "lm_head"):
            assert rows[phase, part]["us"] > 0
        assert rows[phase, "lm_head"]["launches_per_layer"] is None
    mlp = rows["verify", "mlp"]
    assert mlp["launches_per_layer"] == pytest.approx(mlp["launches"] / 2)
    busy = sum(row["us"] for row in rows.values())
    assert busy + results["gaps_us"] == pytest.approx(results["round_us"])
    assert 0 < results["longest_gap_us"] <= results["gaps_us"]
    assert rows.get(("other", "other"), {"share": 0})["share"] < 0.1
    assert sum(kernel["us"] for kernel in results["kernels"]) == pytest.approx(busy)
    assert "us between the calls" in printed.err
    assert plot.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "chain"], "not plain, chain:K"),
        (["--mode", "plain", "--draft-head", "dspark"], "--draft-head would do nothing"),
        (["--mode", "plain", "--drafter-quantization", "fp8"], "give a mode that drafts, such as"),
        (["--rounds", "1"], "--rounds 2"),
        (["--batch", "0"], "must be at least 1"),
        (["--sp", "0"], "parallel sizes must be >= 1"),
        (["--sp", "3"], "--page-size 16 cannot be split over 3 devices; it can over 1, 2, 4"),
        (["--kernels", "all"], "the kernels are for Hopper GPUs"),
        (["--plot", "/no/such/folder/plot.png"], "no directory /no/such/folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert profile_round.main([*TINY, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("jaxspec profile-round: ") and message in line
