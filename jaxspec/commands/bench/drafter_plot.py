"""The picture of `jaxspec bench drafters`: speed-up by batch size, and acceptance by depth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxspec.commands.bench.drafter_tables import (
    Row,
    Run,
    at_setting,
    by_run,
    describe,
    most_texts,
    run_names,
    run_of,
    settings,
)

COLORS = matplotlib.color_sequences["tab10"]
MARKERS, LINES = "osD^vPX*", ("-", "--", ":", "-.")
Styles = Mapping[Run, Mapping[str, Any]]
WIDTH = 14  # inches
SPREAD = 0.5  # of a batch's points, beside each other so that none hides another


def plot_drafters(results: Mapping[str, Any], path: Path) -> None:
    """Two panels for each temperature and kind of prompts. A colour is a drafter, a marker and line
    style a mode."""
    parts = settings(results)
    styles = styles_of([row for row in results["rows"] if row["mode"] != "plain"])
    columns = legend_columns([style["label"] for style in styles.values()])
    height = 0.6 + 4.4 * len(parts) + 0.2 * -(-len(styles) // columns)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(len(parts), 2, squeeze=False)
    for part, (speeds, depths) in zip(parts, panels, strict=True):
        rows = at_setting(results, part)
        runs = by_run([row for row in rows if row["mode"] != "plain"])
        draw_speedups(speeds, runs, styles)
        draw_depths(depths, runs, styles)
        speeds.set_title(describe(results, part), loc="left")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, dpi=120)


def legend_columns(names: Sequence[str]) -> int:
    """So many that long names do not reach over the picture's edges."""
    return max(1, int(WIDTH / (0.7 + 0.085 * max(map(len, names)))))


def styles_of(rows: Sequence[Row]) -> Styles:
    """How each run is drawn, and called."""
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    return {
        (drafter, mode): {
            "label": name,
            "color": COLORS[drafters.index(drafter) % len(COLORS)],
            "marker": MARKERS[modes.index(mode) % len(MARKERS)],
            "linestyle": LINES[modes.index(mode) % len(LINES)],
            "markersize": 5,
            "linewidth": 1.3,
        }
        for (drafter, mode), name in run_names(rows).items()
    }


def draw_speedups(axes: Axes, runs: Sequence[Sequence[Row]], styles: Styles) -> None:
    """Lines over the batch sizes, which stand at even distances."""
    sizes = list(dict.fromkeys(row["batch"] for run in runs for row in run))
    for index, run in enumerate(runs):
        shift = SPREAD * ((index + 0.5) / len(runs) - 0.5)
        places = [sizes.index(row["batch"]) + shift for row in run]
        axes.plot(places, [row["speedup"] for row in run], **styles[run_of(run[0])])
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    axes.set_ylabel("speed-up over plain decoding")
    axes.grid(axis="y", alpha=0.3)


def draw_depths(axes: Axes, runs: Sequence[Sequence[Row]], styles: Styles) -> None:
    """Shares of rounds, with intervals, in the most texts that there are of a run."""
    deepest = 1
    for index, run in enumerate(runs):
        row = most_texts(run)
        found = row["acceptance"]
        shares, shift = found["by_depth"], SPREAD * ((index + 0.5) / len(runs) - 0.5)
        pairs = list(zip(shares, found["by_depth_intervals"], strict=True))
        axes.errorbar(
            [depth + 1 + shift for depth in range(len(shares))],
            [100 * share for share in shares],
            yerr=[
                [100 * max(0.0, share - low) for share, (low, _) in pairs],
                [100 * max(0.0, high - share) for share, (_, high) in pairs],
            ],
            elinewidth=0.8,
            **styles[run_of(row)],
        )
        deepest = max(deepest, len(shares))
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 100)
    axes.set(xlabel="drafted tokens", ylabel="% of rounds that accept so many, or more")
    axes.grid(axis="y", alpha=0.3)
