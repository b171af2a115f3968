"""Options of `jaxspec train-drafter`: the parser, and what applies to which method."""

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxspec.commands.shared.shell import add_model_option, command_parser
from jaxspec.commands.shared.training_options import (
    add_length_options,
    add_optimizer_options,
    add_suffixes_option,
)
from jaxspec.config.checks import Problems
from jaxspec.config.model import ModelConfig
from jaxspec.training.heads.candidate_loss import block_loss_for
from jaxspec.training.heads.correction_sizes import CorrectionSizes, extra_of
from jaxspec.training.heads.loss import Loss, LossConfig
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.precision import resolve_precision

DEFAULT_LICENSE = "Trained on the data and for the model named above, each under its own licence."

CHOOSING = ("dflash2", "lilicorr")  # among candidates of each depth
BLOCK = ("dflash", "dspark", *CHOOSING)
METHODS = ("eagle3", "eagle1", "mtp", *BLOCK)
# Methods of the options that not all take. (An MTP layer has the model's own sizes, and block heads
# draft with the model's LM head.)
METHODS_OF = {
    "--draft-vocab": ("eagle3", "eagle1"),
    "--capture": ("eagle3", "eagle1", *BLOCK),
    "--ff": ("eagle3", "eagle1", *BLOCK),
    "--layers": ("eagle3", "eagle1", *BLOCK),
    "--unroll": ("eagle3", "eagle1", "mtp"),
    "--block-size": BLOCK,
    "--mask-token": BLOCK,
    "--markov-rank": ("dspark",),
    "--selector-rank": ("dflash2",),
    "--lattice-width": ("lilicorr",),
    "--candidates": CHOOSING,
    "--taps": CHOOSING,
    "--anchors": BLOCK,
}
OF_ANSWERS = (
    *("--prompt-tokens", "--regenerate-rows", "--regenerate-batch"),
    *("--regenerate-temperatures", "--keep-text", "--answers"),
)
# The least values of numbers, where they are given.
LEAST = {
    "--prompt-tokens": 1,
    "--regenerate-rows": 1,
    "--regenerate-batch": 1,
    "--layers": 1,
    "--ff": 1,
    "--unroll": 1,
    "--anchors": 1,
    "--markov-rank": 0,
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = command_parser("train-drafter", description)
    add = parser.add_argument
    add_model_option(parser)
    add("--data", type=Path, nargs="+", required=True, help="folders, text files or .jsonl files")
    add("--out", type=Path, required=True, help="folder of the exported head")
    add("--method", choices=METHODS, default="eagle3", help="layout of the head; mtp: a layer like "
        "the model's last one, named as in DeepSeek-V3; dflash, dspark, dflash2, lilicorr: Qwen3 "
        "layers that draft a block in one pass")  # fmt: skip
    add("--work", type=Path, default=Path("runs/drafter"), help="checkpoints, log, answers")
    add("--resume", action="store_true", help="resume from the last checkpoint in --work, with the "
        "answers written by then; without it, checkpoints there are deleted")  # fmt: skip
    add_length_options(parser, "time for everything, start-up and export included; --regenerate "
        "stops after half of it, and the answers written by then are used")  # fmt: skip
    _add_data_options(parser)
    _add_head_options(parser)
    _add_block_options(parser)
    _add_training_options(parser)
    add("--license-note", default=DEFAULT_LICENSE, help="licence note in the model card")
    return parser


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add_suffixes_option(group)
    add = group.add_argument
    add("--length", type=int, default=512, help="tokens of a row")
    add("--regenerate", action="store_true", help="let the model write the answers (of a chat, the "
        "first one)")  # fmt: skip
    add("--regenerate-rows", type=int, help="only so many rows (default: all)")
    add("--regenerate-temperatures", type=float, nargs="+", help="temperatures of the answers; row "
        "i uses the i-th, cyclically (default: 0 1)")  # fmt: skip
    add("--answers", type=Path, help="--work of an earlier run with --regenerate: "
        "its answers are used as they are, so several heads learn from the same")  # fmt: skip
    add("--regenerate-batch", type=int, help="batch size of it (default: 64)")
    add("--keep-text", action="store_true", help="train on the data's own text too")
    add("--prompt-tokens", type=int, help="prompt of a text row (default: 64)")


def _add_head_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("head").add_argument
    add("--draft-vocab", type=int, help="size of the draft vocabulary, the most "
        "frequent tokens (default: the whole vocabulary)")  # fmt: skip
    add("--capture", type=int, nargs="+", help="target layers whose hidden states "
        "the head reads (default: as in the method's official code, or by published heads of it)"
    )  # fmt: skip
    add("--ff", type=int, help="width of the MLP (default: the model's)")
    add("--layers", type=int, help="layers of the head (default: 1, of a block head "
        "2; published block heads have 5)")  # fmt: skip


def _add_block_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(f"block heads ({', '.join(BLOCK)})").add_argument
    add("--block-size", type=int, help="tokens of a block (default: 8; published: "
        "DSpark 7, DFlash 2 8 and 16, the others 16); dspark drafts as many, the others one "
        "token less")  # fmt: skip
    add("--mask-token", type=int, help="id of the masks in a block (default: the "
        "first id past the tokenizer's, else the one that ends a text)")  # fmt: skip
    add("--markov-rank", type=int, help="rank of dspark's Markov head; 0: none "
        "(default: a quarter of the hidden size, at most 256 as published)")  # fmt: skip
    add("--candidates", type=int, help="tokens of each depth that dflash2 or lilicorr chooses "
        "among by the token before (default: 16, 8 as published)")  # fmt: skip
    add("--selector-rank", type=int, help="rank of dflash2's selector (default: that of a Markov "
        "head)")  # fmt: skip
    add("--lattice-width", type=int, help="width of lilicorr's transformer over candidates "
        "(default: a quarter of the hidden size, at most 1024 as published)")  # fmt: skip
    add("--taps", type=int, help="taps of the convolutions around attention and MLP (default: of "
        "dflash2 2 as published; lilicorr has none, and 2 in published variants)")  # fmt: skip
    add("--anchors", type=int, help="blocks of a row that a step learns, at random "
        "places (default: 64)")  # fmt: skip


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--unroll", type=int, help="steps of the training-time test (default: the method's)")
    add("--accumulation", type=int, default=1, help="micro-batches of a step")
    add_optimizer_options(group, batch=32, lr=1e-3, warmup=100, steps_per_call=10)


def loss_of(args: argparse.Namespace) -> Loss:
    if args.method not in BLOCK:
        return LossConfig.for_method(args.method, args.unroll)
    steps = block_size(args) - (args.method != "dspark")
    return block_loss_for(args.method, steps, 64 if args.anchors is None else args.anchors)


def correction_sizes(args: argparse.Namespace) -> CorrectionSizes:
    """The sizes of a block head's correction; a method has one of the two ranks."""
    rank = args.selector_rank if args.markov_rank is None else args.markov_rank
    return CorrectionSizes(rank, args.candidates, args.lattice_width, args.taps)


def block_size(args: argparse.Namespace) -> int:
    return 8 if args.block_size is None else args.block_size


def train_config(args: argparse.Namespace, head_dim: int) -> DraftTrainConfig:
    dtype, attention = resolve_precision(args.dtype, args.attention, head_dim)
    return DraftTrainConfig(
        loss=loss_of(args),
        batch_size=args.batch,
        accumulation=args.accumulation,
        learning_rate=args.lr,
        warmup_steps=args.warmup,
        seed=args.seed,
        attention=attention,
        compute_dtype=dtype,
    )


def check_options(args: argparse.Namespace, model: ModelConfig) -> None:
    """Raise ValueError for rows longer than the model allows, for options without effect, and for
    numbers that do not fit: all of them in one."""
    problems, idle = Problems(), _given(args, _not_of(args.method))
    if args.length > model.max_position:
        problems.add(f"--length {args.length} exceeds the model's {model.max_position}")
    if idle:
        problems.add(f"--method {args.method} does not take {' and '.join(idle)}")
    if not args.regenerate and (others := _given(args, OF_ANSWERS)):
        problems.add(f"{' and '.join(others)} would do nothing: add --regenerate")
    for name in _given(args, LEAST):
        if _value(args, name) < LEAST[name]:
            problems.add(f"{name} must be at least {LEAST[name]}, got {_value(args, name)}")
    if args.method in BLOCK:
        _check_block(args, model, problems)
    # What a method does not take would be told twice.
    if args.method in CHOOSING and not idle and block_size(args) > 1:
        with problems.caught():
            extra_of(args.method, model, block_size(args), correction_sizes(args))
    problems.raise_all()


def _check_block(args: argparse.Namespace, model: ModelConfig, problems: Problems) -> None:
    least = 1 if args.method == "dspark" else 2
    if block_size(args) < least:
        problems.add(f"--block-size must be at least {least}, got {args.block_size}")
    if args.mask_token is not None and not 0 <= args.mask_token < model.vocab_size:
        problems.add(
            f"--mask-token {args.mask_token} is no id of the model's {model.vocab_size} tokens"
        )
    layers = args.capture or [0]
    increasing = all(a < b for a, b in itertools.pairwise(layers))
    if not increasing or layers[0] < 0 or layers[-1] > model.num_layers:
        given = " ".join(map(str, layers))
        problems.add(f"--capture must be increasing, from 0 to {model.num_layers}, got {given}")


def _not_of(method: str) -> list[str]:
    """The options that a method does not take."""
    return [name for name, methods in METHODS_OF.items() if method not in methods]


def _given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the options that are given, be it as 0."""
    values = ((name, _value(args, name)) for name in names)
    return [name for name, value in values if value is not None and value is not False]


def _value(args: argparse.Namespace, name: str) -> Any:
    """What an option was given; None, or of a flag False: it was not."""
    return vars(args)[name[2:].replace("-", "_")]
