"""Train a draft head for a model (EAGLE-3, EAGLE-1, an MTP layer, DFlash, DSpark, DFlash 2 or
LiLiCorr), and export it in the official layout.

Data are folders or files of text, or .jsonl files with `text` or chat `messages` on each line (of a
chat, only the assistant's messages are learned). With --regenerate the model first writes the
answers itself: a head learns best from the text that it will draft.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxspec import LLM, SpeculationConfig
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.commands.shared.shell import run_command, typed_command
from jaxspec.commands.shared.training_options import progress_parts, schedule_of
from jaxspec.commands.train_drafter import options
from jaxspec.commands.train_drafter.options import (
    BLOCK,
    block_size,
    check_options,
    correction_sizes,
    train_config,
)
from jaxspec.config.engine import EngineConfig
from jaxspec.config.model import ModelConfig, draft_layers
from jaxspec.llm.tokenizer import load_tokenizer
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config, parse_model_config, with_mtp_layer
from jaxspec.models.heads import BlockConfig, block_layers
from jaxspec.models.json.values import read_json
from jaxspec.training.heads import data as draft_data
from jaxspec.training.heads.block_init import default_mask, init_block_head, new_block_config
from jaxspec.training.heads.data import ExampleReport, Examples
from jaxspec.training.heads.report import DraftCard, export_head
from jaxspec.training.heads.run import DraftData, DraftRecord, DraftTraining
from jaxspec.training.heads.step import Head, init_head, init_mtp_layer
from jaxspec.training.lm.model import num_parameters
from jaxspec.training.progress import counting, follow, progress_bar
from jaxspec.training.regenerate import concatenate, regenerate
from jaxspec.training.run_folder import check_resumable
from jaxspec.training.schedule import deadline_of

# Shares of a time budget: reserved for the last export, and at whose end each part of --regenerate
# must be done, in this order.
EXPORT_SHARE = 0.03
ANSWERS_UNTIL = {"held-out": 0.1, "train": 0.5}
HELD_OUT_ANSWERS = 256


def make_parser() -> argparse.ArgumentParser:
    return options.make_parser(__doc__)


def model_answers(
    args: argparse.Namespace, console: Console, train: Examples, held_out: Examples, started: float
) -> tuple[Examples, Examples]:
    """Rows (training, held out) with the model's own answers, as many as there is time for.

    A resumed run uses the answers of the run that it resumes, and with --answers those there.
    """
    folder, written = args.answers or args.work, args.resume or args.answers is not None
    llm = LLM(
        args.model,
        "ngram",
        speculation=SpeculationConfig.chain(3),
        max_length=args.length,
        engine=EngineConfig(max_rows=args.regenerate_batch or 64),
        dtype=None if args.dtype == "auto" else args.dtype,
    )
    wanted = {
        "held-out": held_out.spread(HELD_OUT_ANSWERS).shuffled(),
        "train": train.spread(args.regenerate_rows).shuffled(),
    }
    answers: dict[str, Examples] = {}
    with progress_bar(console) as progress:
        for name, share in ANSWERS_UNTIL.items():
            answers[name] = regenerate(
                llm,
                wanted[name],
                folder / f"answers-{name}.jsonl",
                temperatures=tuple(args.regenerate_temperatures or (0.0, 1.0)),
                deadline=started if written else deadline_of(started, args.minutes, share),
                report=counting(progress, f"answers, {name}"),
                read_only=args.answers is not None,
            )
            if len(answers[name]) < len(wanted[name]):
                console.print(
                    f"answers, {name}: {len(answers[name])} of {len(wanted[name])} rows written "
                    + ("when the run began" if written else f"in {share:.0%} of --minutes")
                    + ", which are used"
                )
    return answers["train"], answers["held-out"]


def prepare_rows(
    args: argparse.Namespace, console: Console, started: float
) -> tuple[Examples, Examples, ExampleReport]:
    """Training rows, held-out rows, and a report on the data."""
    console.print("reading and tokenizing --data")
    train, held_out, report = draft_data.read_examples(
        args.data,
        load_tokenizer(args.model),
        args.length,
        prompt_tokens=64 if args.prompt_tokens is None else args.prompt_tokens,
        suffixes=tuple(args.suffixes),
    )
    console.print(str(report))
    if not args.regenerate:
        return train, held_out, report
    answers, held_out = model_answers(args, console, train, held_out, started)
    train = concatenate(answers, train) if args.keep_text else answers
    learned = int(train.learned.sum())
    report = dataclasses.replace(
        report, train_rows=len(train), held_out_rows=len(held_out), learned_tokens=learned
    )
    console.print(f"with the model's own answers: {report}")
    return train, held_out, report


def head_config(args: argparse.Namespace, target: ModelConfig) -> ModelConfig:
    """Llama layers of the target's sizes."""
    return draft_layers(target, 1 if args.layers is None else args.layers, args.ff)


def new_head(
    args: argparse.Namespace,
    target: Decoder,
    hf_config: Mapping[str, Any],
    token_ids: np.ndarray | None,
    block: BlockConfig | None,
) -> Head:
    if block is not None:
        return init_block_head(target, block, args.seed)
    if args.method == "mtp":
        mtp = parse_model_config(with_mtp_layer(hf_config)).mtp
        assert mtp is not None
        return init_mtp_layer(target, mtp, args.seed)
    return init_head(
        target,
        head_config(args, target.config),
        args.method,
        capture=None if args.capture is None else tuple(args.capture),
        token_ids=token_ids,
        seed=args.seed,
    )


def block_head_config(args: argparse.Namespace, config: ModelConfig) -> BlockConfig | None:
    """The config of a new block head; None for other methods."""
    if args.method not in BLOCK:
        return None
    mask = args.mask_token
    if mask is None:
        mask = default_mask(config, len(load_tokenizer(args.model)))
    return new_block_config(
        config,
        block_layers(config, 2 if args.layers is None else args.layers, args.ff),
        args.method,
        block_size=block_size(args),
        mask_token=mask,
        capture=None if args.capture is None else tuple(args.capture),
        sizes=correction_sizes(args),
    )


def describe(record: DraftRecord) -> str:
    """One line: step, loss, held-out accuracies, speed."""
    parts = progress_parts(record, record.total_loss)
    if record.held_out_accuracy:
        shares = " ".join(f"{share:.1%}" for share in record.held_out_accuracy)
        parts.append(f"held-out accuracy by step: {shares}")
    return "  ".join(parts)


def train(args: argparse.Namespace, console: Console, started: float) -> None:
    directory = resolve_directory(args.model)
    model, hf_config = load_model_config(directory), read_json(directory / "config.json")
    check_options(args, model)
    block = block_head_config(args, model)  # fails now, not after the answers
    if args.resume:
        check_resumable(args.work)
    args.out.mkdir(parents=True, exist_ok=True)  # fails now, not after training
    config = train_config(args, draft_layers(model).layers[0].attention.head_dim)
    schedule = schedule_of(args, started, EXPORT_SHARE, evaluation_tokens=1 << 17)
    train_rows, held_out, report = prepare_rows(args, console, started)
    target = load_decoder(directory, model, np.dtype(config.compute_dtype))
    size = model.vocab_size if args.draft_vocab is None else args.draft_vocab
    token_ids = draft_data.draft_vocabulary(train_rows, model.vocab_size, size)
    head = new_head(args, target, hf_config, token_ids, block)
    if schedule.deadline is not None and time.monotonic() >= schedule.deadline:
        raise ValueError(
            "--minutes were over before training began: give more (answers in --work are reused)"
        )
    run = DraftTraining(
        head, target, config, DraftData(train_rows, held_out), schedule, args.work,
        resume=args.resume, data_parallel=jax.device_count(),
    )  # fmt: skip
    card = DraftCard(
        name=args.out.name,
        target=str(args.model),
        device=jax.devices()[0].device_kind,
        command=typed_command(),
        coverage=draft_data.coverage(train_rows, token_ids),
        report=report,
        license_note=args.license_note,
    )
    console.print(
        f"{num_parameters(head):,} parameters, {config.attention} attention, "
        f"{config.compute_dtype}, {jax.device_count()} x {card.device}, draft vocabulary covers "
        f"{card.coverage:.2%}, {time.monotonic() - started:.1f} s so far"
    )
    exported = False
    for record in follow(run.run, describe, console, started):
        exported = record.saved
        if exported:
            export_head(run, model, hf_config, card, args.out)
    if not exported:  # the resumed run was complete already
        export_head(run, model, hf_config, card, args.out)
    console.print(f"{args.out}: written after {time.monotonic() - started:.1f} s")


def run(args: argparse.Namespace) -> None:
    train(args, Console(soft_wrap=True), time.monotonic())


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
