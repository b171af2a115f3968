"""Tables of `jaxspec bench drafters` as Markdown, for pages of results."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.commands.bench.drafter_tables import (
    Row,
    at_setting,
    by_run,
    most_texts,
    run_names,
    run_of,
    settings,
)
from jaxspec.evaluation.number_format import with_interval

Part = Mapping[str, Any]


def as_markdown(parts: Sequence[Part]) -> str:
    """What was measured with, a table for each temperature and kind of prompts, and the commands.

    The parts are lines of --json that belong together.
    """
    results = {**parts[-1], "rows": [row for part in parts for row in part["rows"]]}
    names = run_names(results["rows"])
    lines = [f"{heading(results)}.", ""]
    for setting in settings(results):
        temperature, kind = setting
        title = " ".join(filter(None, (kind, f"temperature {temperature:g}")))
        lines += [*table(title, at_setting(results, setting), names), ""]
    return "\n".join([*lines, *commands(parts)])


def heading(results: Part) -> str:
    rows = results["rows"]
    least, most = (f(row["texts"] // row["batch"] for row in rows) for f in (min, max))
    batches = f"{most}" if least == most else f"{least} to {most}"
    turns = max(row.get("turns", 1) for row in rows)
    return (
        f"{Path(results['model']).name}, {results['dtype']}, {results['device']}, jax "
        f"{results['jax']}: tokens/s, ms a round, speed-up over plain decoding (the median of "
        f"{batches} batches{f' of {turns} turns each' if turns > 1 else ''}, with its 95 % "
        f"interval); prompts of at most {results['prompt_tokens']} tokens, "
        f"{results['max_tokens']} new ones each"
    )


def table(title: str, rows: Sequence[Row], names: Mapping[Any, str]) -> Iterator[str]:
    """A line for each run; the fastest of each batch size is bold."""
    sizes = list(dict.fromkeys(row["batch"] for row in rows))
    best = {
        size: max((row["speedup"] for row in rows if row["batch"] == size), default=1.0)
        for size in sizes
    }
    yield f"| {title} | {' | '.join(f'batch {size}' for size in sizes)} | tokens a round |"
    yield "|---" * (len(sizes) + 2) + "|"
    for run in by_run(rows):
        cells = {row["batch"]: cell(row, row["speedup"] == best[row["batch"]]) for row in run}
        found = most_texts(run)["acceptance"]
        length = with_interval(found["length"], found["length_interval"])
        plain = run[0]["mode"] == "plain"
        yield (
            f"| {'plain decoding' if plain else f'`{names[run_of(run[0])]}`'} | "
            f"{' | '.join(cells.get(size, '') for size in sizes)} | {'1' if plain else length} |"
        )


def cell(row: Row, is_best: bool) -> str:
    text = f"{row['tokens_per_second']:,.0f}, {row['round_ms']:.2f} ms"
    if row["mode"] != "plain":
        text += f", {with_interval(row['speedup'], row['speedup_interval'], unit='x')}"
    return f"**{text}**" if is_best else text


def commands(parts: Sequence[Part]) -> Iterator[str]:
    """Each command after what is known of its run."""
    yield "```bash"
    runs = {part["command"]: part for part in parts}
    for command, part in runs.items():
        commit, *dirty = part.get("commit", "unknown").split("-")
        yield f"# {part['date'][:10]}, commit {'-'.join([commit[:8], *dirty])}"
        yield command
    yield "```"
