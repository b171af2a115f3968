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
