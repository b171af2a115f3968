"""Time how devices that share a model sum their products, with the addition and norm that follow.

Three ways: `one-shot` and `two-shot` of the kernel reduce_add_rms_norm, in which GPUs write to each
other's memory, and XLA's all-reduce (NCCL), all as nodes of one CUDA graph. Without Hopper GPUs
that reach each other's memory only the last is timed. The table ends with the fastest way by rows.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

from jaxspec.benchmarking.device_sums import (
    WAYS,
    Sum,
    Timing,
    cases,
    fastest_ranges,
    has_kernels,
    time_sums,
)
from jaxspec.commands.run_facts import run_facts
from jaxspec.commands.shell import (
    JSON_PARTS,
    collect_parts,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    table_console,
)
from pallas_kernels.reduce_add_rms_norm.exchange import DEVICES, MAX_WIDTH, WIDTH_STEP


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers, separated by commas."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be positive numbers, got {text}")
    return tuple(dict.fromkeys(map(int, parts)))


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench exchange", __doc__)
    add = parser.add_argument
    add("--devices", type=numbers, help="numbers of devices, 2, 4 or 8, separated by commas "
        "(default: all of these that there are)")  # fmt: skip
    add("--widths", type=numbers, default=(4096, 8192), help="hidden sizes")
    add("--rows", type=numbers, default=tuple(2**power for power in range(11)),
        help="rows of a call: sequences times nodes")  # fmt: skip
    add("--passes", type=int, default=20, help="passes of 64 calls in a timed program")
    add("--repeats", type=int, default=5, help="timed programs of a case; the median is reported")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


def check_options(args: argparse.Namespace, devices: Sequence[int]) -> None:
    """Raises ValueError for all options that cannot be, at once."""
    there, problems = jax.device_count(), []
    if wrong := [count for count in devices if count not in DEVICES or count > there]:
        problems.append(
            f"--devices must be some of {', '.join(map(str, DEVICES))}, at most the {there} there "
            f"are, got {', '.join(map(str, wrong))}"
        )
    if not devices:
        problems.append(f"--devices: at least two are needed, and there are {there}")
    if wrong := [width for width in args.widths if width % WIDTH_STEP or width > MAX_WIDTH]:
        problems.append(
            f"--widths must be multiples of {WIDTH_STEP} up to {MAX_WIDTH}, got "
            f"{', '.join(map(str, wrong))}"
        )
    for name in ("passes", "repeats"):
        if getattr(args, name) < 1:
            problems.append(f"--{name} must be at least 1, got {getattr(args, name)}")
    if problems:
        raise ValueError("; ".join(problems))


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A part for each case, with everything needed to read it later."""
    console = progress_console()
    there = jax.device_count()
    devices = args.devices or [count for count in DEVICES if count <= there]
    check_options(args, devices)
    ways = WAYS
    if not has_kernels(devices):
        ways = ("all-reduce",)
        console.print(
            "these are no Hopper GPUs that reach each other's memory: XLA's all-reduce alone"
        )
    chosen = cases(devices, args.widths, args.rows, ways)
    facts = {**run_facts(), "arguments": vars(args) | {"devices": list(devices)}}
    for timing in time_sums(chosen, args.passes, args.repeats, console.print):
        console.print(f"{timing.sum}: {timing.us:.1f} us")
        record = dataclasses.asdict(timing.sum) | {"us": timing.us, "same_bits": timing.same_bits}
        yield facts | {"timings": [record]}


def read_timing(record: dict[str, Any]) -> Timing:
    """Of a record as ``measure`` makes it."""
    case = Sum(*(record[field.name] for field in dataclasses.fields(Sum)))
    return Timing(case, record["us"], record["same_bits"])


def make_tables(results: dict[str, Any]) -> list[Table]:
    """The times by rows, and the fastest way by rows."""
    timings = [read_timing(record) for record in results["timings"]]
    ways = [way for way in WAYS if any(timing.sum.way == way for timing in timings)]
    found: dict[tuple[int, int, int], dict[str, Timing]] = {}
    for timing in timings:
        place = timing.sum.devices, timing.sum.width, timing.sum.rows
        found.setdefault(place, {})[timing.sum.way] = timing
    times = left_table(f"us a call, {device_line(results)}")
    for name in ("devices", "width", "rows", *ways, "fastest", "same bits"):
        times.add_column(name, justify="right")
    for place, row in found.items():
        us = [f"{row[way].us:.1f}" if way in row else "-" for way in ways]
        fastest = min(row.values(), key=lambda timing: timing.us).sum.way
        same = all(timing.same_bits for timing in row.values())
        times.add_row(*map(str, place), *us, fastest, "yes" if same else "NO")
    crossover = left_table("fastest", str(results["command"]))
    for name in ("devices", "width", "way by rows"):
        crossover.add_column(name)
    for (devices, width), ranges in fastest_ranges(timings).items():
        text = ", ".join(f"{part.way} {part.first}-{part.last}" for part in ranges)
        crossover.add_row(str(devices), str(width), text)
    return [times, crossover]


def run(args: argparse.Namespace) -> None:
    results = collect_parts(measure(args), "timings", as_json=args.json)
    for table in make_tables(results):
        table_console(stderr=args.json).print(table)
    if not all(record["same_bits"] for record in results["timings"]):
        raise ValueError("devices, or the two ways of the kernel, ended with different bits")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
