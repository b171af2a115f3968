"""What a trained model or head is exported with: its log, the curves of it, and a model card."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxspec.training.run import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """Fields of a model card that the run itself does not know."""

    name: str
    device: str
    command: str
    license_note: str


def write_report(
    records: Sequence[Record], log: Path, metrics: Mapping[str, str], picture: Path, card: str
) -> None:
    """Write a log of records, the curves of some metrics, and README.md beside them.

    ``metrics``: see plot.
    """
    lines = [json.dumps(dataclasses.asdict(record)) for record in records]
    log.write_text("\n".join(lines) + "\n")
    plot(records, metrics, picture)
    log.with_name("README.md").write_text(card)


def plot(records: Sequence[Record], metrics: Mapping[str, str], path: Path) -> None:
    """Curves of metrics by tokens seen, as a PNG; dots: of held-out data. A metric that has a value
    for each step of a draft has as many curves.

    ``metrics``: the scales of their axes by their names.
    """
    figure = Figure(figsize=(3 + 4 * len(metrics), 4), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, (name, scale) in zip(panels, metrics.items(), strict=True):
        _plot(panel, records, name, {"linewidth": 0.7, "alpha": 0.5})
        _plot(panel, records, f"held_out_{name}", {"marker": "."})
        panel.set(xlabel="million tokens", ylabel=name, yscale=scale)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _plot(panel: Any, records: Sequence[Record], name: str, style: Mapping[str, Any]) -> None:
    found = [(r.tokens / 1e6, value) for r in records if (value := getattr(r, name)) is not None]
    tokens, values = [x for x, _ in found], np.array([value for _, value in found])
    curves = values.reshape(len(found), -1).T if found else []
    label = name.replace("_", " ")
    for step, curve in enumerate(curves, 1):
        shown = label if len(curves) == 1 else f"{label}, step {step}"
        panel.plot(tokens, curve, color=f"C{step - 1}", label=shown, **style)
