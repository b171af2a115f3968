"""Reads what `bench engine --json` and `bench serving --json` wrote, and sets runs side by side."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS_OF_HOUR = 3600


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one run measured of one case. Times are in milliseconds.

    Attributes:
      floor_ms: the least time of a round, by the memory bandwidth that this run measured.
    """

    tokens_per_second: float
    round_ms: float | None = None
    floor_ms: float | None = None
    first_token_ms: float | None = None

    @property
    def share_of_floor(self) -> float | None:
        if self.floor_ms is None or self.round_ms is None:
            return None
        return self.floor_ms / self.round_ms


@dataclasses.dataclass(frozen=True)
class RunFile:
    """The results of one file, by case.

    Attributes:
      name: the file's name without its suffix.
      facts: device, jax, date and command of the run's last line.
    """

    name: str
    facts: Mapping[str, str]
    cases: Mapping[str, Figures]


def read_runs(paths: Sequence[Path]) -> list[RunFile]:
    """Raises ValueError for files that cannot be read, and for two of one name."""
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two files are called {name}: rename one")
    return runs


def read_run(path: Path) -> RunFile:
    """Read the JSON lines of one run.

    Raises ValueError that names the file, if it cannot be read, is not what the commands write, or
    holds a case twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parts = list(_json_values(text))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path} as lines of JSON: {error}") from error
    cases: dict[str, Figures] = {}
    facts: dict[str, str] = {}
    for part in parts:
        try:
            found = list(_figures_of(part))
            facts = {name: str(part[name]) for name in ("device", "jax", "date", "command")}
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} is not of bench_engine.py --json or bench_serving.py --json: {error!r}"
            ) from error
        for case, figures in found:
            if case in cases:
                raise ValueError(f"{path} holds {case!r} twice: keep one run in a file")
            _check(figures, case, path)
            cases[case] = figures
    if not cases:
        raise ValueError(f"{path} holds no timings and no runs")
    return RunFile(path.stem, facts, cases)


def _json_values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after the other, on one line each or not."""
    decoder, start = json.JSONDecoder(), 0
    while rest := text[start:].lstrip():
        start = len(text) - len(rest)
        value, start = decoder.raw_decode(text, start)
        yield value


def _figures_of(part: Mapping[str, Any]) -> Iterator[tuple[str, Figures]]:
    arguments = part["arguments"]
    if "timings" in part:
        if "floor_ms" not in part["timings"][0]:
            raise KeyError("floor_ms")
        for row in part["timings"]:
            yield (
                _engine_case(arguments, row),
                Figures(
                    tokens_per_second=row["tokens_per_second"],
                    round_ms=row["round_ms"],
                    floor_ms=row["floor_ms"],
                ),
            )
        return
    for row in part["runs"]:
        yield (
            _serving_case(arguments, row),
            Figures(
                tokens_per_second=row["generated_per_second"],
                first_token_ms=1e3 * row["first_token"]["p50"],
            ),
        )


def _engine_case(arguments: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    sampling = arguments["sampling"]
    contexts = arguments["context"]
    context = contexts if isinstance(contexts, int) else round(row["first_context"])
    lengths = f"{context} + {arguments['new_tokens']}"
    sampled = "" if sampling == "greedy" else f", {sampling}"
    return f"{arguments['shape']}, {row['mode']}, batch {row['batch']}, {lengths}{sampled}"


def _serving_case(arguments: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    model = arguments["shape"] or Path(arguments["model"]).name
    arrivals = "at once" if row["rate"] is None else f"{row['rate']:.3g} a second"
    lengths = f"{arguments['prompt_tokens']} + {arguments['new_tokens']}"
    if arguments["lengths"]:
        lengths = f"lengths of {Path(arguments['lengths']).name}"
    if arguments["shared_prefix"]:
        lengths = f"{arguments['shared_prefix']} shared + {lengths}"
    structured = f", {row['structured']} structured" if row["structured"] else ""
    cached = "" if row["prefix_cache"] else ", uncached"
    tree = arguments["tree"]
    mode = row["mode"] if tree in (None, row["mode"]) else f"{row['mode']} {tree}"
    return (
        f"{model}, serving {row['requests']} {arrivals}, {mode}, {arguments['rows']} rows, "
        f"{lengths}{structured}{cached}"
    )


def _check(figures: Figures, case: str, path: Path) -> None:
    for name, value in dataclasses.asdict(figures).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{path}: {name} of {case!r} must be a number above 0, not {value!r}")


def compare(
    runs: Sequence[RunFile], watts: Mapping[str, float], dollars: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One record for each case and each run that has it, in the order in which cases first appear.

    ``watts`` and ``dollars`` (an hour) are of all devices of a run together, by its name. A record
    has ``ratio``, its tokens a second to those of the first run, where that has the case.

    Raises ValueError for a name that no run has.
    """
    for name in (*watts, *dollars):
        if name not in [run.name for run in runs]:
            raise ValueError(
                f"no file is called {name!r}: choose from {', '.join(run.name for run in runs)}"
            )
    records = []
    for case in dict.fromkeys(case for run in runs for case in run.cases):
        first = runs[0].cases.get(case)
        for run in runs:
            figures = run.cases.get(case)
            if figures is None:
                continue
            rate = figures.tokens_per_second
            derived = {"share_of_floor": figures.share_of_floor, "ratio": None}
            if first is not None:
                derived["ratio"] = rate / first.tokens_per_second
            if run.name in watts:
                derived["tokens_per_joule"] = rate / watts[run.name]
            if run.name in dollars:
                derived["tokens_per_dollar"] = rate * SECONDS_OF_HOUR / dollars[run.name]
            records.append({"case": case, "run": run.name} | dataclasses.asdict(figures) | derived)
    return records
