"""Benchmarks side by side, from files that the two commands wrote on a CPU with tiny shapes."""

import json
from pathlib import Path

import pytest

from jaxspec.commands import compare_runs
from jaxspec.evaluation.benchmarks.run_files import compare, read_run, read_runs

DATA = Path(__file__).parents[1] / "data/runs"
FIRST, SECOND, SERVED = (DATA / f"{name}.json" for name in ("one_cpu", "bfloat16", "served"))
PLAIN = "tiny, plain, batch 1, 20 + 12"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_of_one_case_stand_beside_each_other(capsys: pytest.CaptureFixture[str]):
    costs = ["--watts", "one_cpu=20", "--dollars", "bfloat16=0.5", "--json"]
    assert compare_runs.main([str(FIRST), str(SECOND), str(SERVED), *costs]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    rows = {(row["case"], row["run"]): row for row in results["figures"]}
    first, second = (lines(path)[0]["timings"][0] for path in (FIRST, SECOND))
    ours, theirs = rows[PLAIN, "one_cpu"], rows[PLAIN, "bfloat16"]
    assert ours["round_ms"] == first["round_ms"] and ours["ratio"] == 1
    assert ours["tokens_per_joule"] == pytest.approx(first["tokens_per_second"] / 20)
    assert theirs["share_of_floor"] == pytest.approx(second["share_of_floor"])
    assert theirs["ratio"] == second["tokens_per_second"] / first["tokens_per_second"]
    assert theirs["tokens_per_dollar"] == pytest.approx(second["tokens_per_second"] * 7200)
    assert "tokens_per_dollar" not in ours and "tokens_per_joule" not in theirs
    # A case that the first run lacks has no ratio; serving has no round and no floor.
    assert rows["tiny, chain:3@1.5, batch 1, 20 + 12", "bfloat16"]["ratio"] is None
    (served,) = [row for row in results["figures"] if row["run"] == "served"]
    assert served["round_ms"] is served["share_of_floor"] is None
    assert served["tokens_per_second"] == lines(SERVED)[0]["runs"][0]["generated_per_second"]
    assert [run["name"] for run in results["runs"]] == ["one_cpu", "bfloat16", "served"]
    for text in (f"{first['round_ms']:.3f}", "tokens/J", "tokens/$", "served: cpu, jax"):
        assert text in printed.err


def test_columns_that_no_run_fills_are_left_out(capsys: pytest.CaptureFixture[str]):
    assert compare_runs.main([str(FIRST)]) == 0
    printed = capsys.readouterr().out
    assert "ms/round" in printed and "tokens/J" not in printed and "first token" not in printed


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    png = tmp_path / "new" / "runs.png"
    assert compare_runs.main([str(FIRST), str(SERVED), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_values_may_spread_over_lines(tmp_path: Path):
    pretty = tmp_path / "pretty.json"
    pretty.write_text("\n".join(json.dumps(part, indent=1) for part in lines(FIRST)))
    assert read_run(pretty).cases == read_run(FIRST).cases


def test_what_was_asked_for_makes_a_case(tmp_path: Path):
    part = lines(FIRST)[0]
    part["arguments"] |= {"sampling": "top_p", "kernels": "none", "tp": 2}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(part))
    records = compare(read_runs([FIRST, other]), {}, {})
    assert records[-1]["case"] == f"{PLAIN}, top_p" and records[-1]["ratio"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "no timings and no runs"),
        ("measuring the memory bandwidth\n", "as lines of JSON"),
        ("[1, 2]", "is not of bench_engine.py --json"),
        ('{"timings": [], "arguments": {}}', "is not of bench_engine.py --json"),
        ("{first}{first}", "twice: keep one run in a file"),
        ("{zero}", "tokens_per_second of 'tiny, plain, batch 1, 20 + 12' must be a number above 0"),
        ("{text}", "round_ms of 'tiny, plain, batch 1, 20 + 12' must be a number above 0"),
    ],
)
def test_a_bad_file_is_one_line(text: str | None, message: str, tmp_path: Path, capsys):
    part, path = lines(FIRST)[0], tmp_path / "bad.json"
    row = part["timings"][0]
    changed = {
        "{first}{first}": json.dumps(part) * 2,
        "{zero}": json.dumps(part | {"timings": [row | {"tokens_per_second": 0}]}),
        "{text}": json.dumps(part | {"timings": [row | {"round_ms": "fast"}]}),
    }
    if text is not None:
        path.write_text(changed.get(text, text))
    assert compare_runs.main([str(FIRST), str(path)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("jaxspec compare-runs: ") and message in line and str(path) in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{first}", "{first}"], "two files are called one_cpu: rename one"),
        (["{first}", "--watts", "h100=700"], "no file is called 'h100': choose from one_cpu"),
    ],
)
def test_bad_names_are_one_line(arguments, message, capsys):
    assert compare_runs.main([argument.format(first=FIRST) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["700", "one_cpu=", "one_cpu=-1", "one_cpu=nan", "=3"])
def test_costs_are_named_numbers_above_0(text: str, capsys):
    with pytest.raises(SystemExit):
        compare_runs.main([str(FIRST), f"--watts={text}"])
    assert "is not NAME=WATTS with a number above 0" in capsys.readouterr().err
