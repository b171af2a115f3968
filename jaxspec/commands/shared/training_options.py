"""What trainings and measurements with held-out text share: options, and what they mean."""

import argparse
import collections
from pathlib import Path

from rich.console import Console

from jaxspec.llm.tokenizer import load_tokenizer
from jaxspec.training import data
from jaxspec.training.heads.data import held_out_prompts
from jaxspec.training.heads.run import DraftRecord
from jaxspec.training.lm.run import LMRecord
from jaxspec.training.schedule import Schedule, deadline_of

DATA_HELP = (
    "folders, text or .jsonl files, named as in training: a file is held out by the hash of its "
    "name below them"
)


def add_data_options(parser: argparse._ActionsContainer) -> None:
    """``data`` and which of it commands measure with: held-out text."""
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=DATA_HELP)
    add_choice_options(parser)


def add_choice_options(parser: argparse._ActionsContainer) -> None:
    """What of ``data`` is used: ``suffixes`` and ``all_rows``."""
    add_suffixes_option(parser)
    parser.add_argument("--all-rows", action="store_true", help="all of --data is held out: no "
        "training has seen it")  # fmt: skip


def read_prompts(
    args: argparse.Namespace, number: int, prompt_tokens: int, max_tokens: int, console: Console
) -> tuple[list[list[int]], list[str]]:
    """At most so many prompts of ``add_data_options`` for --model, and the kind of each; says what
    was read."""
    prompts, kinds, report = held_out_prompts(
        args.data,
        load_tokenizer(args.model),
        number,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        suffixes=tuple(args.suffixes),
        all_rows=args.all_rows,
    )
    console.print(str(report))
    counts = sorted(collections.Counter(kinds).items())
    if len(counts) > 1:
        console.print(f"prompts: {', '.join(f'{count} {kind}' for kind, count in counts)}")
    return prompts, kinds


def add_suffixes_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--suffixes", nargs="+", default=list(data.DEFAULT_SUFFIXES),
        help="suffixes of the files to read in folders")  # fmt: skip


def add_length_options(parser: argparse.ArgumentParser, minutes: str) -> None:
    """``steps`` or ``minutes``, which has this help."""
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--steps", type=int, help="training steps")
    add("--minutes", type=float, help=minutes)


def add_optimizer_options(
    group: argparse._ActionsContainer, *, batch: int, lr: float, warmup: int, steps_per_call: int
) -> None:
    """How a step is taken, and what happens between steps; the arguments are defaults."""
    add = group.add_argument
    add("--batch", type=int, default=batch, help="rows of a step")
    add("--lr", type=float, default=lr, help="highest learning rate")
    add("--warmup", type=int, default=warmup, help="steps of learning rate warm-up")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--attention", choices=("auto", "xla", "cudnn"), default="auto", help="implementation of "
        "attention; auto: cudnn where it runs, else xla")  # fmt: skip
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="dtype of the "
        "computation; auto: bfloat16 on a GPU, else float32")  # fmt: skip
    add("--steps-per-call", type=int, default=steps_per_call, help="most steps between log records")
    add("--evaluate-every", type=int, default=500, help="steps between evaluations on held-out "
        "files")  # fmt: skip
    add("--save-every", type=int, default=1000, help="steps between checkpoints and exports")


def progress_parts(record: LMRecord | DraftRecord, loss: float | None) -> list[str]:
    """The step, its loss and the speed, for a line about a record."""
    parts = [f"step {record.step}/{record.total_steps or '?'}"]
    if loss is not None:
        parts += [f"loss {loss:.4f}", f"|g| {record.grad_norm:.2f}"]
    if record.tokens_per_second:
        parts.append(f"{record.tokens_per_second / 1e3:.1f}k tok/s")
    return parts


def schedule_of(
    args: argparse.Namespace, started: float, export_share: float, evaluation_tokens: int = 1 << 20
) -> Schedule:
    """The schedule that the options mean.

    Args:
      export_share: share of a time budget that is reserved for the last export.
    """
    return Schedule(
        steps=args.steps,
        deadline=deadline_of(started, args.minutes, 1 - export_share),
        steps_per_call=args.steps_per_call,
        evaluate_every=args.evaluate_every,
        save_every=args.save_every,
        evaluation_tokens=evaluation_tokens,
    )
