"""Measure how well models predict held-out text, and how much worse each is than the first.

All are measured on the same rows, so differences have much narrower intervals than perplexities.
Weights and sums are float32, and one layer of a model is in memory at a time: models that a device
could not run can be measured, too. Checkpoints may be quantized.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoints.built_in import BUILT_IN_MODEL
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.shell import (
    command_parser,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.commands.shared.training_options import add_data_options
from jaxspec.evaluation.number_format import with_interval
from jaxspec.evaluation.perplexity import Scores, difference, summarize
from jaxspec.llm.tokenizer import load_tokenizer
from jaxspec.models.from_config.model import load_model_config
from jaxspec.quantize.scoring import score
from jaxspec.training.heads.data import Examples, read_examples
from jaxspec.training.progress import counting, progress_bar


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("measure-perplexity", __doc__)
    add = parser.add_argument
    add("--model", nargs="+", default=[str(BUILT_IN_MODEL)], help="model directories or hub ids "
        "with one vocabulary (default: the built-in model)")  # fmt: skip
    add_data_options(parser)
    add("--held-out", type=number, default=128, help="rows of held-out text")
    add("--length", type=number, default=512, help="tokens of a row")
    add("--batch", type=number, default=8, help="rows computed at a time")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def held_out_rows(args: argparse.Namespace, models: Sequence[Path], console: Console) -> Examples:
    """Raises ValueError for models of several vocabularies, before anything long begins."""
    sizes = [load_model_config(model).vocab_size for model in models]
    if len(set(sizes)) > 1:
        raise ValueError(f"the models have vocabularies of {', '.join(map(str, sizes))} tokens")
    tokenizer = load_tokenizer(models[0])
    _, rows, report = read_examples(
        args.data, tokenizer, args.length, suffixes=tuple(args.suffixes)
    )
    console.print(str(report))
    return rows.spread(args.held_out)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    models = [resolve_directory(model) for model in args.model]
    rows = held_out_rows(args, models, console)
    scores: list[Scores] = []
    with progress_bar(console) as progress:
        for name, model in zip(args.model, models, strict=True):
            show = counting(progress, f"{Path(name).name}, layer")
            scores.append(score(model, rows.tokens, rows.learned, args.batch, show))
    results = []
    for name, model_scores in zip(args.model, scores, strict=True):
        worse, interval = difference(scores[0], model_scores)
        found = dataclasses.asdict(summarize(model_scores))
        results.append({"model": name, **found, "worse": worse, "worse_interval": interval})
    return {"device": jax.devices()[0].device_kind, "results": results}


def make_table(report: dict[str, Any]) -> Table:
    first, *_ = report["results"]
    tokens, sequences = first["tokens"], first["sequences"]
    table = Table(
        "model",
        "perplexity (95 %)",
        "worse than the first, nats a token (95 %)",
        title=f"{tokens:,} tokens of {sequences} held-out rows, on {report['device']}",
    )
    for result in report["results"]:
        perplexity = with_interval(result["perplexity"], result["perplexity_interval"], ".3f")
        worse = with_interval(result["worse"], result["worse_interval"], "+.4f")
        table.add_row(result["model"], perplexity, "" if result is first else worse)
    return table


def run(args: argparse.Namespace) -> None:
    report = measure(args, progress_console())
    show_results(report, make_table(report), as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
