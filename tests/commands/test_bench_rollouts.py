"""The command ``jaxspec bench rollouts``."""

from pathlib import Path

import pytest

from jaxspec.commands.bench.rollouts import ENGINES, main, make_tables
from tests.helpers.compilations import Compilations
from tests.helpers.json_lines import joined

SMALL = ["--prompts", "2", "--samples", "2", "--tokens", "16", "--prompt-tokens", "16"]


@pytest.mark.slow
def test_all_engines_write_the_same_samples(
    sources: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    compilations: Compilations,
):
    plot = tmp_path / "plot.png"
    options = ["--steps", "3", "--learning-rate", "1e-4", "--json"]
    assert main([*SMALL, *options, "--data", str(sources), "--plot", str(plot)]) == 0
    results = joined(capsys.readouterr().out, "rows")
    rows = results["rows"]
    assert [(row["step"], row["engine"]) for row in rows] == [
        (step, engine) for step in range(3) for engine in ENGINES
    ]
    assert all(row["equal"] == row["samples"] == 4 for row in rows)
    for row in rows:
        assert row["seconds"] > 0 and row["tokens_per_round"] > 0
        assert sum(row["trees"].values()) >= row["slowest"]["rounds"]
        assert (set(row["trees"]) == {"plain"}) >= (row["engine"] == "plain")
        assert 0 < row["tokens"] <= 4 * 16
        assert (row["sync_seconds"] > 0) == (row["step"] > 0)
        assert 0 <= row["learned"]["reward"] <= 1 and row["learned"]["kl_per_token"] >= 0
    written = [[row["tokens"] for row in rows if row["step"] == step] for step in range(3)]
    assert all(len(set(each)) == 1 for each in written)
    assert plot.stat().st_size > 5_000
    names = [name for name, _ in compilations]  # what learns compiles once, though states change
    assert names.count("jit(grpo_step)") == names.count("jit(train_step)") == 1


def test_the_table_names_the_slowest_sample():
    """Of all steps but the first, which compiles."""
    row = {
        **{"engine": "plain", "seconds": 1.0, "speedup": 1.0, "sync_seconds": 0.0, "trees": {}},
        **{"tokens_per_round": 1.0, "equal": 4, "samples": 4},
    }
    rows = [
        row | {"step": step, "slowest": {"sample": sample, "tokens": 16, "rounds": rounds}}
        for step, sample, rounds in ((0, 0, 16), (1, 3, 9), (2, 1, 12))
    ]
    facts = {"device": "cpu", "jax": "0", "date": "", "command": ""}
    [table] = make_tables({**facts, "rows": rows})
    cells = [cell for column in table.columns for cell in column.cells]
    assert "step 2, sample 1: 16 tokens, 12 rounds" in cells


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "2"], "--steps must be at least 3: the first step compiles"),
        (["--engines", "other"], "invalid choice: 'other'"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (
            ["--deterministic", "--steps", "2", "--tree", "16"],
            "--steps must be at least 3: the first step compiles; --deterministic cannot be with "
            "repair, as old texts are not read there: give --engines plain speculative "
            "'learning head'; --tree: ",
        ),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, sources: Path, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main([*SMALL, "--data", str(sources), *options])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
