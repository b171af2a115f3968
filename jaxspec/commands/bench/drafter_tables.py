"""Tables of `jaxspec bench drafters`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.shell import left_table
from jaxspec.decoding.drafters.names import split_mixed
from jaxspec.evaluation.number_format import with_interval
from jaxspec.llm.text_drafts.opening import PREFIX

Row = Mapping[str, Any]
Run = tuple[str, str]  # drafter and mode
Setting = tuple[float, str]  # temperature and kind of prompts
Names = Mapping[Run, str]
MOST_WIDTH = 1000  # of a table, in characters


def run_of(row: Row) -> Run:
    return row["drafter"], row["mode"]


def run_names(rows: Sequence[Row]) -> dict[Run, str]:
    """What each run is called: of a drafter's path the last part, or as many of the last parts as
    no other drafter's path ends with."""
    names = {}
    drafters = {run: _split(run[0]) for run in dict.fromkeys(map(run_of, rows))}
    tails = distinct_tails([path for _, path in drafters.values()])
    for run, (prefix, path) in drafters.items():
        names[run] = "plain" if run[1] == "plain" else f"{prefix}{tails[path]} {run[1]}"
    return names


def _split(drafter: str) -> tuple[str, str]:
    """What stands before a drafter's path (``ngram+``, ``text:``), and the path."""
    if drafter.startswith(PREFIX):
        return PREFIX, drafter.removeprefix(PREFIX)
    return split_mixed(drafter)


def distinct_tails(paths: Iterable[str]) -> dict[str, str]:
    """The shortest end of each path, its last part at least, in which no other path ends."""
    parts = {path: Path(path).parts for path in paths}
    tails = {}
    for path, words in parts.items():
        others = [other for other in parts.values() if other != words]
        lengths = range(1, len(words))
        alone = (n for n in lengths if all(other[-n:] != words[-n:] for other in others))
        tails[path] = str(Path(*words[-next(alone, len(words)) :]))
    return tails


def by_run(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run, in the order in which runs and rows come."""
    runs: dict[Run, list[Row]] = {}
    for row in rows:
        runs.setdefault(run_of(row), []).append(row)
    return list(runs.values())


def most_texts(rows: Sequence[Row]) -> Row:
    """The row whose acceptance is counted in most texts."""
    return max(rows, key=lambda row: row["texts"])


def settings(results: Mapping[str, Any]) -> list[Setting]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(map(setting_of, results["rows"])))


def setting_of(row: Row) -> Setting:
    return row["temperature"], row.get("kind", "")


def at_setting(results: Mapping[str, Any], setting: Setting) -> list[Row]:
    return [row for row in results["rows"] if setting_of(row) == setting]


def describe(results: Mapping[str, Any], setting: Setting) -> str:
    temperature, kind = setting
    name, dtype = Path(results["model"]).name, results["dtype"]
    parts = (name, dtype, f"temperature {temperature:g}", kind, f"on {results['device']}")
    return ", ".join(filter(None, parts))


def make_tables(results: Mapping[str, Any]) -> list[Table]:
    """For each temperature and kind of prompts one of speeds and one of acceptance."""
    tables, names = [], run_names(results["rows"])
    for setting in settings(results):
        rows = at_setting(results, setting)
        title = describe(results, setting)
        tables += [speed_table(title, rows, names), acceptance_table(title, rows, names)]
    return [*tables, memory_table(results, names)]


def full_width(table: Table) -> int:
    """What a table takes if none of its lines is cut: a console cuts names and numbers off."""
    console = Console(width=MOST_WIDTH)
    return console.measure(table).maximum


def speed_table(title: str, rows: Sequence[Row], names: Names) -> Table:
    table = left_table(
        f"{title}: tokens/s, ms a round, median speed-up over plain with its 95 % interval"
    )
    table.add_column("drafter", no_wrap=True)
    for size in dict.fromkeys(row["batch"] for row in rows):
        table.add_column(f"batch {size}", justify="right", no_wrap=True)
    table.add_column("identical", justify="right", no_wrap=True)
    for run in by_run(rows):
        cells = (
            f"{row['tokens_per_second']:,.0f} {row['round_ms']:7.2f} "
            + with_interval(row["speedup"], row["speedup_interval"], unit="x")
            for row in run
        )
        identical, texts = (sum(row[name] for row in run) for name in ("identical", "texts"))
        table.add_row(names[run_of(run[0])], *cells, f"{identical} of {texts}")
    return table


def acceptance_table(title: str, rows: Sequence[Row], names: Names) -> Table:
    """Half the width of an interval stands for it, where it is not given in full."""
    texts = max(row["texts"] for row in rows)
    table = left_table(f"{title}: acceptance in {texts} texts, with 95 % intervals")
    table.add_column("drafter", no_wrap=True)
    table.add_column("tokens a round", justify="right", no_wrap=True)
    table.add_column("% of rounds that accept 1, 2, ... drafted tokens")
    for run in by_run(rows):
        row = most_texts(run)
        if row["mode"] == "plain":
            continue
        found = row["acceptance"]
        depths = zip(found["by_depth"], found["by_depth_intervals"], strict=True)
        shares = (f"{100 * share:.0f}±{50 * (top - least):.0f}" for share, (least, top) in depths)
        table.add_row(
            names[run_of(row)],
            with_interval(found["length"], found["length_interval"]),
            "  ".join(shares),
        )
    return table


def memory_table(results: Mapping[str, Any], names: Names) -> Table:
    table = left_table(
        "memory on each device",
        f"{results['date']}, jax {results['jax']}\n{results['command']}",
    )
    table.add_column("model", no_wrap=True)
    table.add_column("weights, MB", justify="right")
    table.add_column("cache, bytes a token", justify="right")
    sizes = results["target_weight_bytes"], results["target_token_bytes"]
    table.add_row("target", *_memory(*sizes))
    for row in (rows[0] for rows in by_run(results["rows"])):
        if row["mode"] != "plain":
            table.add_row(names[run_of(row)], *_memory(row["weight_bytes"], row["token_bytes"]))
    return table


def _memory(weights: int, token: float) -> tuple[str, str]:
    return f"{weights / 1e6:,.2f}", f"{token:,.0f}"
