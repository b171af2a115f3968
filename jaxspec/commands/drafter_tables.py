"""Tables of `jaxspec bench drafters`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxspec.speculation.drafters.names import split_mixed

Row = Mapping[str, Any]


def label(row: Row) -> str:
    """The run's name: of the drafter only the last part of a path."""
    if row["mode"] == "plain":
        return "plain"
    mixed, own = split_mixed(row["drafter"])
    return f"{mixed}{Path(own).name} {row['mode']}"


def by_run(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run, in the order in which runs and rows come."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["drafter"], row["mode"]), []).append(row)
    return list(runs.values())


def most_texts(rows: Sequence[Row]) -> Row:
    """The row whose acceptance is counted in most texts."""
    return max(rows, key=lambda row: row["texts"])


def temperatures(results: Mapping[str, Any]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in results["rows"]))


def at_temperature(results: Mapping[str, Any], temperature: float) -> list[Row]:
    return [row for row in results["rows"] if row["temperature"] == temperature]


def setting(results: Mapping[str, Any], temperature: float) -> str:
    name, dtype = Path(results["model"]).name, results["dtype"]
    return f"{name}, {dtype}, temperature {temperature:g}, on {results['device']}"


def make_tables(results: Mapping[str, Any]) -> list[Table]:
    """For each temperature one of speeds and one of acceptance."""
    tables = []
    for temperature in temperatures(results):
        rows = at_temperature(results, temperature)
        title = setting(results, temperature)
        tables += [speed_table(title, rows), acceptance_table(title, rows)]
    return [*tables, memory_table(results)]


def speed_table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{title}: tokens/s, ms a round, speed-up over plain", title_justify="left")
    table.add_column("drafter", no_wrap=True)
    for size in dict.fromkeys(row["batch"] for row in rows):
        table.add_column(f"batch {size}", justify="right", no_wrap=True)
    table.add_column("identical", justify="right", no_wrap=True)
    for own in by_run(rows):
        cells = (
            f"{row['tokens_per_second']:,.0f} {row['round_ms']:7.2f} {row['speedup']:5.2f}x"
            for row in own
        )
        identical, texts = (sum(row[name] for row in own) for name in ("identical", "texts"))
        table.add_row(label(own[0]), *cells, f"{identical} of {texts}")
    return table


def acceptance_table(title: str, rows: Sequence[Row]) -> Table:
    """Half the width of an interval stands for it, where it is not given in full."""
    texts = max(row["texts"] for row in rows)
    table = Table(
        title=f"{title}: acceptance in {texts} texts, with 95 % intervals", title_justify="left"
    )
    table.add_column("drafter", no_wrap=True)
    table.add_column("tokens a round", justify="right", no_wrap=True)
    table.add_column("% of rounds that accept 1, 2, ... drafted tokens")
    for own in by_run(rows):
        row = most_texts(own)
        if row["mode"] == "plain":
            continue
        found = row["acceptance"]
        low, high = found["length_interval"]
        depths = zip(found["by_depth"], found["by_depth_intervals"], strict=True)
        shares = (f"{100 * share:.0f}±{50 * (top - least):.0f}" for share, (least, top) in depths)
        table.add_row(
            label(row), f"{found['length']:.2f} ({low:.2f} to {high:.2f})", "  ".join(shares)
        )
    return table


def memory_table(results: Mapping[str, Any]) -> Table:
    table = Table(
        title="memory on each device",
        caption=f"{results['date']}, jax {results['jax']}\n{results['command']}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("model", no_wrap=True)
    table.add_column("weights, MB", justify="right")
    table.add_column("cache, bytes a token", justify="right")
    own = results["target_weight_bytes"], results["target_token_bytes"]
    table.add_row("target", *_memory(*own))
    for row in (rows[0] for rows in by_run(results["rows"])):
        if row["mode"] != "plain":
            table.add_row(label(row), *_memory(row["weight_bytes"], row["token_bytes"]))
    return table


def _memory(weights: int, token: float) -> tuple[str, str]:
    return f"{weights / 1e6:,.2f}", f"{token:,.0f}"
