"""Timing sums over devices, on simulated CPU devices: XLA's all-reduce alone."""

import pytest

from jaxspec.commands.bench import exchange as bench_exchange
from jaxspec.evaluation.benchmarks.device_sums import cases
from tests.helpers.json_lines import joined


def test_the_command_prints_json_and_tables(capsys: pytest.CaptureFixture[str]):
    sizes = ["--devices", "2", "--widths", "512", "--rows", "1,3"]
    assert bench_exchange.main([*sizes, "--passes", "1", "--repeats", "1", "--json"]) == 0
    printed = capsys.readouterr()
    timings = joined(printed.out, "timings")["timings"]
    assert [(row["devices"], row["rows"]) for row in timings] == [(2, 1), (2, 3)]
    for row in timings:
        assert (row["width"], row["way"], row["same_bits"]) == (512, "all-reduce", True)
        assert row["us"] > 0
    assert "no Hopper GPUs that reach each other's memory: XLA's all-reduce alone" in printed.err


def test_columns_that_cannot_be_divided_have_no_two_shot_way():
    def ways(devices: int, width: int) -> list[str]:
        return [case.way for case in cases([devices], [width], [8])]

    assert ways(4, 4096) == ["one-shot", "two-shot", "all-reduce"]
    assert ways(8, 2560) == ["one-shot", "all-reduce"]


def test_the_table_names_the_fastest_way():
    times = {"one-shot": 5.0, "two-shot": 7.0, "all-reduce": 4.0}
    rows = [
        {
            "devices": 4,
            "width": 4096,
            "rows": 8,
            "way": way,
            "us": us,
            "same_bits": way != "one-shot",
        }
        for way, us in times.items()
    ]
    facts = {"device": "H100", "jax": "0.11.2", "date": "today", "command": "c"}
    [table] = bench_exchange.make_tables(facts | {"timings": rows})
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["4", "4096", "8", "5.0", "7.0", "4.0", "all-reduce", "NO"]
