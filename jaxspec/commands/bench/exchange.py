"""Time how devices that share a model sum their products, with the addition and norm that follow.

Three ways: `one-shot` and `two-shot` of the kernel reduce_add_rms_norm, in which GPUs write to each
other's memory, and XLA's all-reduce (NCCL), all as nodes of one CUDA graph. Without Hopper GPUs
that reach each other's memory only the last is timed.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

from jaxspec.commands.shared.option_types import number, numbers
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.evaluation.benchmarks.device_sums import (
    WAYS,
    cases,
    has_kernels,
    time_sums,
)
from pallas_kernels.reduce_add_rms_norm.exchange import DEVICES, MAX_WIDTH, WIDTH_STEP


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench exchange", __doc__)
    add = parser.add_argument
    add("--devices", type=numbers, help="numbers of devices, 2, 4 or 8, separated by commas "
        "(default: all of these that there are)")  # fmt: skip
    add("--widths", type=numbers, default=(4096, 8192), help="hidden sizes")
    add("--rows", type=numbers, default=tuple(2**power for power in range(11)),
        help="rows of a call: sequences times nodes")  # fmt: skip
    add("--passes", type=number, default=20, help="passes of 64 calls in a timed program")
    add("--repeats", type=number, default=5, help="timed programs of a case; the median is "
        "reported")  # fmt: skip
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
    for case, us, same_bits in time_sums(chosen, args.passes, args.repeats, console.print):
        console.print(f"{case}: {us:.1f} us")
        row = dataclasses.asdict(case) | {"us": us, "same_bits": same_bits}
        yield facts | {"timings": [row]}


def make_tables(results: dict[str, Any]) -> list[Table]:
    """The times by rows."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in results["timings"]:
        found.setdefault((row["devices"], row["width"], row["rows"]), {})[row["way"]] = row
    ways = [way for way in WAYS if any(way in rows for rows in found.values())]
    table = left_table(
        f"us a call, {device_line(results)}",
        results["command"],
        right=("devices", "width", "rows", *ways, "fastest", "same bits"),
    )
    for place, rows in found.items():
        us = [f"{rows[way]['us']:.1f}" if way in rows else "-" for way in ways]
        fastest = min(rows, key=lambda way: rows[way]["us"])
        same = all(row["same_bits"] for row in rows.values())
        table.add_row(*map(str, place), *us, fastest, "yes" if same else "NO")
    return [table]


def run(args: argparse.Namespace) -> None:
    results = show_parts(measure(args), "timings", make_tables, as_json=args.json)
    if not all(record["same_bits"] for record in results["timings"]):
        raise ValueError("devices, or the two ways of the kernel, ended with different bits")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
