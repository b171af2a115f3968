"""`jaxspec bench drafters`: the speed of drafters beside that of plain decoding."""

from dataclasses import asdict

import pytest
from matplotlib.axes import Axes

from jaxspec.commands import bench_drafters
from jaxspec.comparison import RaceResult
from tests.json_lines import joined


@pytest.mark.slow
def test_every_run_is_raced_at_every_batch_size(sources, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    code = bench_drafters.main(
        ["--data", str(sources), "--batch", "1", "2", "--batches", "2", "--prompt-tokens", "16",
         "--max-tokens", "24", "--run", "ngram", "chain:3", "--plot", str(plot), "--json"]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    rows = joined(printed.out, "rows")["rows"]
    assert [(row["batch"], row["mode"], row["texts"]) for row in rows] == [
        (1, "plain", 2), (1, "chain:3", 2), (2, "plain", 4), (2, "chain:3", 4)
    ]  # fmt: skip
    for row in rows:
        assert row["identical"] == row["texts"]
        if row["mode"] == "plain":
            assert row["speedup"] == row["acceptance_length"] == 1
        else:
            assert row["speedup"] > 0 and 1 < row["acceptance_length"] <= 4
    assert "ngram chain:3" in printed.err
    assert plot.stat().st_size > 5_000


def test_bars_stand_over_their_own_batch_size(tmp_path, monkeypatch):
    rows = [
        {
            "batch": batch,
            "drafter": drafter,
            "mode": mode,
            **asdict(RaceResult(1.0, (), batch + (drafter == "a/h"), 1.0, 1, 1)),
        }
        for batch in (16, 1)
        for drafter, mode in (("none", "plain"), ("a/h", "chain:3"), ("b/h", "chain:3"))
    ]
    drawn = []
    monkeypatch.setattr(Axes, "bar_label", lambda axes, bars, **options: drawn.append(bars))
    results = {"model": "m", "dtype": "float32", "temperature": 0, "device": "cpu", "rows": rows}
    bench_drafters.plot_speedups(results, tmp_path / "plot.png")
    found = {(round(bar.get_x() + 0.2), bar.get_height()) for bars in drawn for bar in bars}
    assert found == {(0, 17), (0, 16), (1, 2), (1, 1)}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "ngram", "chain"], "not plain, chain:K"),
        (["--batch", "0"], "must be at least 1"),
        (["--batch", "500"], "fewer than one batch"),
        (["--run", "/no/such/head", "chain:3"], "no directory"),
        (["--run", "none", "chain:3"], "names another drafter"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, sources, capsys):
    assert bench_drafters.main(["--data", str(sources), *arguments]) == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.strip()][-1]
    assert line.startswith("jaxspec bench drafters: ") and message in line
