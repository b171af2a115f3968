"""Timing sums over devices, on simulated CPU devices: XLA's all-reduce alone."""

import pytest

from jaxspec.benchmarking.device_sums import Range, Sum, Timing, cases, fastest_ranges
from jaxspec.commands import bench_exchange
from tests.json_lines import joined


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
    assert "all-reduce 1-3" in printed.err


def test_columns_that_cannot_be_divided_have_no_two_shot_way():
    def ways(devices: int, width: int) -> list[str]:
        return [case.way for case in cases([devices], [width], [8])]

    assert ways(4, 4096) == ["one-shot", "two-shot", "all-reduce"]
    assert ways(8, 2560) == ["one-shot", "all-reduce"]


def test_the_fastest_way_by_rows():
    times = {"one-shot": (5, 6, 9), "two-shot": (7, 7, 7), "all-reduce": (9, 9, 8)}
    timings = [
        Timing(Sum(4, 4096, rows, way), us, True)  # pyright: ignore[reportArgumentType]
        for way, values in times.items()
        for rows, us in zip((1, 8, 64), values, strict=True)
    ]
    expected = [Range("one-shot", 1, 8), Range("two-shot", 64, 64)]
    assert fastest_ranges(timings) == {(4, 4096): expected}
    record = {"devices": 4, "width": 4096, "rows": 8, "way": "one-shot", "us": 1, "same_bits": True}
    assert bench_exchange.read_timing(record) == Timing(Sum(4, 4096, 8, "one-shot"), 1, True)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--devices", "3"], ["--devices must be some of 2, 4, 8", "got 3"]),
        (["--widths", "0"], ["--widths: must be positive numbers, got 0"]),
        (
            ["--widths", "500,9216", "--devices", "16", "--passes", "0"],
            ["got 16; --widths must be multiples of 512", "500, 9216", "--passes must be at least"],
        ),
    ],
)
def test_bad_input_is_a_line(
    arguments: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
):
    try:
        assert bench_exchange.main(arguments) == 2
    except SystemExit as error:  # of argparse
        assert error.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("jaxspec bench exchange: ") and all(text in last for text in messages)
