"""Set runs of `jaxspec bench engine --json` or `bench serving --json` side by side.

The files may come from any devices. A case is what was asked for: shape, mode, batch and lengths;
devices, kernels and number of devices are what is compared. The share of the floor is that of the
run's own device: the time that reading a round's bytes would take at the bandwidth measured in the
same run. Tokens/s of serving are those generated. A run is called as its file, without the suffix.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from jaxspec.commands.shared.shell import command_parser, device_line, run_command, show_results
from jaxspec.evaluation.benchmarks.run_files import RunFile, compare, read_runs

# Columns: the key of a record, its title and its format.
COLUMNS = (
    ("round_ms", "ms/round", "{:,.3f}"),
    ("floor_ms", "floor ms", "{:,.3f}"),
    ("share_of_floor", "of its floor", "{:.0%}"),
    ("first_token_ms", "first token ms", "{:,.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("ratio", "to the first", "{:.2f}x"),
    ("tokens_per_joule", "tokens/J", "{:.3g}"),
    ("tokens_per_dollar", "tokens/$", "{:,.0f}"),
)


def named_number(text: str, what: str) -> tuple[str, float]:
    """NAME=NUMBER, for argparse."""
    name, equals, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (name and equals and math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME={what} with a number above 0")
    return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("compare-runs", __doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="files of JSON lines; the first is the baseline")
    add("--watts", action="append", default=[], metavar="NAME=W",
        type=functools.partial(named_number, what="WATTS"),
        help="watts that all devices of a run draw together; can be repeated")  # fmt: skip
    add("--dollars", action="append", default=[], metavar="NAME=PER_HOUR",
        type=functools.partial(named_number, what="PER_HOUR"),
        help="dollars an hour for all devices of a run; can be repeated")  # fmt: skip
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    add("--png", type=Path, help="write tokens/s and shares of the floor as a PNG")
    return parser


def make_table(runs: Sequence[RunFile], records: Sequence[dict[str, Any]]) -> Table:
    caption = "\n".join(
        f"{run.name}: {device_line(facts)}, {facts['command']}"
        for run in runs
        for facts in [run.facts]
    )
    table = Table(caption=caption, caption_justify="left")
    table.add_column("case")
    table.add_column("run", no_wrap=True)
    shown = [
        column for column in COLUMNS if any(record.get(column[0]) is not None for record in records)
    ]
    for _, title, _ in shown:
        table.add_column(title, justify="right", no_wrap=True)
    last = None
    for record in records:
        values = [(record.get(key), form) for key, _, form in shown]
        cells = ["-" if value is None else form.format(value) for value, form in values]
        if last not in (None, record["case"]):
            table.add_section()
        table.add_row("" if record["case"] == last else record["case"], record["run"], *cells)
        last = record["case"]
    return table


def plot(runs: Sequence[RunFile], records: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of tokens/s, and of the share of the floor where a case has one."""
    cases = list(dict.fromkeys(record["case"] for record in records))
    figure = Figure(figsize=(11, 1.5 + 0.3 * len(records)), layout="constrained")
    rates, shares = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(runs)
    for index, run in enumerate(runs):
        of_run = [record for record in records if record["run"] == run.name]
        places = [cases.index(record["case"]) + index * height for record in of_run]
        rates.barh(places, [r["tokens_per_second"] for r in of_run], height, label=run.name)
        shares.barh(places, [100 * (r["share_of_floor"] or 0) for r in of_run], height)
    middle = (len(runs) - 1) * height / 2
    rates.set_yticks([place + middle for place in range(len(cases))], cases, fontsize="small")
    rates.invert_yaxis()
    rates.set(xlabel="tokens/s", xscale="log")
    shares.set(xlabel="% of the device's own memory floor", xlim=(0, None))
    figure.legend(loc="outside upper center", ncols=len(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> None:
    runs = read_runs(args.files)
    records = compare(runs, dict(args.watts), dict(args.dollars))
    sources = [dataclasses.asdict(run) | {"cases": list(run.cases)} for run in runs]
    results = {"runs": sources, "figures": records}
    show_results(results, make_table(runs, records), as_json=args.json)
    if args.png is not None:
        plot(runs, records, args.png)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
