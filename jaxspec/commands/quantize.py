"""Quantize a model, a draft model or a draft head, and write it as a checkpoint.

`awq` and `gptq` calibrate with text, `rtn` (rounding to nearest) and `fp8` do not need any. With
--data, perplexity is measured on the files that training holds out, too. A run that was killed goes
on when the same command is given again. The defaults are those of each method's own format: awq
has zeros, gptq and rtn are symmetric; rtn and fp8 are written as compressed-tensors.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from rich.console import Console

from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.commands.shared.engine_options import add_program_options, check_program_options
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.program_cache import keep_compiled_programs, program_folder
from jaxspec.commands.shared.shell import (
    add_model_option,
    command_parser,
    print_json,
    progress_console,
    run_command,
    typed_command,
)
from jaxspec.commands.shared.training_options import DATA_HELP, add_suffixes_option
from jaxspec.evaluation.perplexity import difference, summarize
from jaxspec.llm.tokenizer import load_tokenizer
from jaxspec.parallel.bytes import megabytes
from jaxspec.quantize.checkpoint import Checkpoint
from jaxspec.quantize.gptq import GptqConfig, Order
from jaxspec.quantize.methods import Method
from jaxspec.quantize.report import Report, perplexity_lines, write_report
from jaxspec.quantize.rounding import Grid
from jaxspec.quantize.run import Quantization, Text
from jaxspec.quantize.scoring import score
from jaxspec.quantize.writing import FORMATS, Activations, FormatName, QuantizationPlan
from jaxspec.training.heads.data import Examples, read_examples
from jaxspec.training.progress import counting, progress_bar

OWN_FORMAT: dict[Method, FormatName] = {
    "rtn": "compressed-tensors",
    "awq": "awq",
    "gptq": "gptq",
    "fp8": "compressed-tensors",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("quantize", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--method", choices=get_args(Method), required=True, help="how weights are rounded")
    add("--out", type=Path, required=True, help="folder of the quantized checkpoint")
    add("--work", type=Path, help="folder of finished layers, kept: the same run can be written in "
        "another format (default: OUT/work, deleted at the end)")  # fmt: skip
    add("--format", choices=FORMATS, help="of the files; dense: float32 weights that mean the same "
        "(default: the method's own)")  # fmt: skip
    add("--bits", type=int, default=4, help="of a weight; 2 to 8 with --format dense")
    add("--group", type=int, default=128, help="inputs that share a scale; -1: all of them")
    add("--symmetric", action=argparse.BooleanOptionalAction, help="no zeros, or groups with zeros "
        "(default: zeros for awq only)")  # fmt: skip
    add("--activations", choices=get_args(Activations), help="fp8: readers round the inputs of "
        "products to e4m3, a scale for each token (4 bits, symmetric)")  # fmt: skip
    add("--order", choices=get_args(Order), default=GptqConfig().order, help="order of gptq's "
        "columns: static and mixed take the largest inputs first (act-order); mixed groups them "
        "in this order, which files must list")  # fmt: skip
    add("--damping", type=float, default=GptqConfig().damping, help="of gptq's Hessian, a share of "
        "its mean diagonal")  # fmt: skip
    add("--lm-head", action="store_true", help="quantize the LM head, too")
    add("--json", action="store_true", help="JSON on stdout, the text on stderr")
    add_suffixes_option(parser)
    add_program_options(parser)
    text = parser.add_argument_group("text")
    text.add_argument("--data", type=Path, nargs="+", help=DATA_HELP)
    text.add_argument("--samples", type=number, default=128, help="rows of text to calibrate with")
    text.add_argument("--length", type=number, default=512, help="tokens of a row")
    text.add_argument("--held-out", type=number, default=128, help="rows to measure perplexity on")
    text.add_argument("--batch", type=number, default=8, help="rows computed at a time")
    return parser


def plan_of(args: argparse.Namespace) -> QuantizationPlan:
    symmetric = args.method != "awq" if args.symmetric is None else args.symmetric
    if args.group != -1 and args.group < 1:
        raise ValueError(f"--group must be at least 1, or -1 for all inputs, got {args.group}")
    return QuantizationPlan(
        method=args.method,
        grid=Grid(args.bits, None if args.group == -1 else args.group, symmetric),
        gptq=GptqConfig(args.order, args.damping),
        format=args.format or OWN_FORMAT[args.method],
        lm_head=args.lm_head,
        activations=args.activations,
    )


def check_folders(args: argparse.Namespace) -> Path:
    """The folder of finished layers. Raises ValueError for an --out that is not free."""
    work = args.work or args.out / "work"
    if (args.out / "config.json").exists():
        raise ValueError(f"{args.out} holds a checkpoint already: choose another --out")
    others = [path.name for path in args.out.glob("*") if path != work]
    left = [name for name in others if not name.startswith("part-")]
    if left and not work.exists():
        raise ValueError(f"{args.out} is not empty ({left[0]}): choose another --out")
    return work


def read_text(
    args: argparse.Namespace, directory: Path, console: Console
) -> tuple[Examples, Examples] | None:
    """Rows to calibrate with, and held-out rows; None without --data."""
    if args.data is None:
        return None
    tokenizer = load_tokenizer(directory)
    train, held_out, report = read_examples(
        args.data, tokenizer, args.length, suffixes=tuple(args.suffixes)
    )
    console.print(str(report))
    return train.shuffled().spread(args.samples), held_out.spread(args.held_out)


def calibration_text(rows: Examples, batch: int) -> Text:
    """Tokens up to the last one that is learned: those after it are padding, or are not needed."""
    after = np.cumsum(rows.learned[:, ::-1], axis=1)[:, ::-1]
    return Text(rows.tokens, after > 0, batch)


def weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def quantize(args: argparse.Namespace, console: Console, started: float) -> Report:
    plan, work = plan_of(args), check_folders(args)
    directory = resolve_directory(args.model)
    checkpoint = Checkpoint(directory)
    if args.data is not None and checkpoint.config is None:
        raise ValueError(
            "a draft head is rounded without text: no --data; see jaxspec eval-drafter"
        )
    rows = read_text(args, directory, console)
    text = None if rows is None else calibration_text(rows[0], args.batch)
    run = Quantization(checkpoint, plan, text, work)
    errors: dict[str, float] = {}
    with progress_bar(console) as progress:
        show = counting(progress, f"{plan.method}, layer")
        for done in run.run():
            errors |= done.errors
            show(done.index + 1, done.units)
    run.write(args.out)
    if args.work is None:
        run.clean()
    report = Report(
        command=typed_command(),
        model=str(args.model),
        device=jax.devices()[0].device_kind,
        seconds=time.monotonic() - started,
        plan=dataclasses.asdict(plan),
        bytes_before=weight_bytes(directory),
        bytes_after=weight_bytes(args.out),
        errors=errors,
    )
    if rows is not None:
        report = dataclasses.replace(report, **measured(args, directory, rows[1], console))
    write_report(report, args.out)
    return report


def measured(
    args: argparse.Namespace, directory: Path, rows: Examples, console: Console
) -> dict[str, Any]:
    """Perplexity before and after, and the difference, as the report's fields."""
    scores = []
    with progress_bar(console) as progress:
        for what, folder in (("original", directory), ("quantized", args.out)):
            show = counting(progress, f"perplexity, {what}, layer")
            scores.append(score(folder, rows.tokens, rows.learned, args.batch, show))
    before, after = map(summarize, scores)
    return {"before": before, "after": after, "worse": difference(*scores)}


def run(args: argparse.Namespace) -> None:
    check_program_options(args)
    keep_compiled_programs(program_folder(args))
    console, started = progress_console(), time.monotonic()
    report, texts = quantize(args, console, started), sys.stderr if args.json else sys.stdout
    for line in [report.describe(), *perplexity_lines(report)]:
        print(line, file=texts)
    seconds = time.monotonic() - started
    size = megabytes(report.bytes_after)
    print(f"{args.out}: {size}, written in {seconds:.0f} s", file=texts)
    if args.json:
        print_json(dataclasses.asdict(report))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
