"""What a run found: JSON, a figure, and a card in Markdown."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaxspec.evaluation.number_format import with_interval
from jaxspec.evaluation.perplexity import Perplexity
from jaxspec.parallel.bytes import megabytes


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known of a quantized checkpoint.

    Attributes:
      errors: of each projection, by its whole name: the mean square of the change in its outputs
        over the calibration text, divided by their mean square.
      before, after: perplexity on held-out text; None if there was no text.
      worse: mean nats a token by which ``after`` is worse on the same sequences, and the interval.
      bytes_before, bytes_after: of the files of weights.
    """

    command: str
    model: str
    device: str
    seconds: float
    plan: dict[str, Any]
    bytes_before: int
    bytes_after: int
    errors: dict[str, float]
    before: Perplexity | None = None
    after: Perplexity | None = None
    worse: tuple[float, tuple[float, float]] | None = None

    def describe(self) -> str:
        """The plan in words."""
        plan, grid = self.plan, self.plan["grid"]
        if plan["method"] == "fp8":
            return "fp8, a scale for each output"
        group = "a scale for each output" if grid["group"] is None else f"groups of {grid['group']}"
        zeros = "symmetric" if grid["symmetric"] else "with zeros"
        order = f", order {plan['gptq']['order']}" if plan["method"] == "gptq" else ""
        inputs = "" if plan["activations"] is None else ", activations rounded to e4m3"
        return f"{plan['method']}, {grid['bits']} bits, {group}, {zeros}{order}{inputs}"


def write_report(report: Report, directory: Path) -> None:
    """Write quantization.json, quantization.png (if errors are known) and README.md."""
    content = dataclasses.asdict(report)
    (directory / "quantization.json").write_text(json.dumps(content, indent=2) + "\n")
    if report.errors:
        plot_errors(report, directory / "quantization.png")
    (directory / "README.md").write_text(card(report, directory.name))


def by_projection(errors: dict[str, float]) -> dict[str, list[tuple[int, float]]]:
    """(layer, error) of each kind of projection; those outside layers come after the last one."""
    found: dict[str, list[tuple[int, float]]] = {}
    layers = [int(name.split(".")[2]) for name in errors if name.startswith("model.layers.")]
    for name, error in errors.items():
        parts = name.split(".")
        layer = int(parts[2]) if name.startswith("model.layers.") else max(layers, default=-1) + 1
        found.setdefault(parts[-1], []).append((layer, error))
    return found


def plot_errors(report: Report, path: Path) -> None:
    """The error of every projection by layer, as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in by_projection(report.errors).items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set(xlabel="layer", ylabel="change of outputs, squared, relative", yscale="log")
    axes.set_title(report.describe(), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def perplexity_lines(report: Report) -> list[str]:
    """Markdown: perplexity before and after; nothing if there was no text."""
    if report.before is None or report.after is None or report.worse is None:
        return []
    lines = [
        "| held-out text | nats a token (95 %) | perplexity (95 %) |",
        "|---|---|---|",
    ]
    for name, found in (("original", report.before), ("quantized", report.after)):
        nats = with_interval(found.nats, found.nats_interval, ".4f")
        perplexity = with_interval(found.perplexity, found.perplexity_interval, ".3f")
        lines.append(f"| {name} | {nats} | {perplexity} |")
    worse, interval = report.worse
    return [
        *lines,
        "",
        f"On the same {report.after.sequences} sequences ({report.after.tokens:,} tokens) the "
        f"quantized model is worse by {with_interval(worse, interval, '.4f')} nats a token"
        f"{', with its activations rounded, too' if report.plan['activations'] else ''}.",
    ]


def card(report: Report, name: str) -> str:
    """The README.md of a quantized checkpoint, in Markdown."""
    figure = ["![Error of every projection by layer](quantization.png)"] if report.errors else []
    parts = [
        f"# {name}",
        f"{Path(report.model).name}, quantized by jaxspec: {report.describe()}; format "
        f"{report.plan['format']}. Weights take {megabytes(report.bytes_after)}, "
        f"{megabytes(report.bytes_before)} before.",
        "\n".join(perplexity_lines(report)),
        *figure,
        f"Made in {report.seconds:.0f} s on {report.device} by\n\n```\n{report.command}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
