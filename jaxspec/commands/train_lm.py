"""Train a small language model from scratch on folders of text, and export it in HF format."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxspec.commands.shared.shell import command_parser, given_option, run_command, typed_command
from jaxspec.commands.shared.training_options import (
    add_length_options,
    add_optimizer_options,
    add_suffixes_option,
    progress_parts,
    schedule_of,
)
from jaxspec.config.model import ModelConfig, dense_model
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.values import read_json
from jaxspec.parallel.bytes import megabytes
from jaxspec.training import data
from jaxspec.training.lm.model import TrainConfig, num_parameters
from jaxspec.training.lm.report import LMCard, export
from jaxspec.training.lm.run import LMRecord, Pretraining, sample
from jaxspec.training.precision import resolve_precision
from jaxspec.training.progress import follow
from jaxspec.training.vocabulary import Vocabulary, vocabulary_of

EXPORT_SHARE = 0.05  # share of a time budget, reserved for the sample and the last export
SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ff", "max_position")
DEFAULT_LICENSE = "Trained on the sources named above, each under its own licence."


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("train-lm", __doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders or files of text")
    add("--out", type=Path, required=True, help="folder of the exported model")
    add("--work", type=Path, default=Path("runs/lm"), help="cached tokens, checkpoints, log")
    add_suffixes_option(parser)
    add("--resume", action="store_true", help="resume from the last checkpoint in --work")
    add_length_options(parser, "for everything, with start-up and export")
    add("--config", type=Path, help="config.json of any supported family (docs/models.md), instead "
        "of the sizes below; its vocabulary and end of text become the tokenizer's")  # fmt: skip
    add("--hidden", type=int, default=256, help="width of the hidden states")
    add("--layers", type=int, default=8, help="layers of the model")
    add("--heads", type=int, default=4, help="query heads")
    add("--kv-heads", type=int, default=2, help="key and value heads")
    add("--head-dim", type=int, default=64, help="width of a head")
    add("--ff", type=int, default=448, help="width of the MLP")
    add("--vocab", type=int, default=4096, help="vocabulary of the tokenizer, which is trained too")
    add("--draft-for", metavar="MODEL", help="directory or hub id of a model that the new one "
        "shall draft for: its tokenizer and vocabulary are taken, and none is trained")  # fmt: skip
    add("--max-position", type=int, default=2048, help="longest text that the model allows")
    add("--context", type=int, default=1024, help="tokens of a training row")
    add_optimizer_options(parser, batch=128, lr=3e-3, warmup=200, steps_per_call=20)
    add("--prompt", default='import numpy as np\n\n\ndef mean(x, axis=None):\n    """',
        help="prompt of the sample in the model card (default: the beginning of a Python "
        "file)")  # fmt: skip
    add("--sample-tokens", type=int, default=128, help="tokens of that sample")
    add("--license-note", default=DEFAULT_LICENSE, help="licence note in the model card")
    return parser


def model_config(
    args: argparse.Namespace, vocabulary: Vocabulary
) -> tuple[ModelConfig, dict[str, Any] | None]:
    """The model, and the config.json to export it with, if it is not the model's own."""
    size, end = vocabulary.size, vocabulary.end_of_text_id
    if args.config is None:
        return _sized_model(args, size, end), None
    option = given_option(make_parser(), args, SIZES)
    if option is not None:
        raise ValueError(f"{option} and --config exclude each other: change the file instead")
    raw = read_json(args.config) | {"vocab_size": size, "eos_token_id": end}
    model = parse_model_config(raw)
    if model.mtp is not None:
        raise ValueError(
            f"{args.config}: set its number of MTP layers to 0; they are trained afterwards, by "
            "jaxspec train-drafter --method mtp"
        )
    _check_context(args.context, "the longest position", model.max_position)
    return model, raw


def _vocabulary(args: argparse.Namespace) -> int | Vocabulary:
    if args.draft_for is None:
        return args.vocab
    if given_option(make_parser(), args, ("vocab",)) is not None:
        raise ValueError("--vocab and --draft-for exclude each other: it is that model's")
    return vocabulary_of(args.draft_for)


def _sized_model(args: argparse.Namespace, vocab_size: int, end_of_text: int) -> ModelConfig:
    _check_context(args.context, "--max-position", args.max_position)
    return dense_model(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.ff,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position=args.max_position,
        tie_word_embeddings=True,
        stop_token_ids=(end_of_text,),
    )


def _check_context(context: int, name: str, limit: int) -> None:
    if context > limit:
        raise ValueError(f"--context {context} exceeds {name} {limit}")


def train_config(args: argparse.Namespace) -> TrainConfig:
    attention = args.attention
    if args.config is not None:  # whose layers may be of kinds that cuDNN does not have
        if attention == "cudnn":
            raise ValueError("--attention cudnn and --config exclude each other: take xla")
        attention = "xla"
    dtype, attention = resolve_precision(args.dtype, attention, args.head_dim)
    return TrainConfig(
        batch_size=args.batch,
        context=args.context,
        learning_rate=args.lr,
        warmup_steps=args.warmup,
        seed=args.seed,
        attention=attention,
        compute_dtype=dtype,
    )


def describe(record: LMRecord) -> str:
    """One line: step, losses, speed."""
    parts = progress_parts(record, record.loss)
    if record.held_out_loss is not None:
        parts.append(f"held out {record.held_out_loss:.4f} = {record.bits_per_byte:.4f} bits/byte")
    return "  ".join(parts)


def print_corpus(console: Console, report: data.Report) -> None:
    for source, (files, size) in report.sources.items():
        console.print(f"{source}: {files} files, {megabytes(size)}")
    console.print(f"skipped: {report.skipped}")
    console.print(
        f"{report.train_tokens:,} training tokens, {report.held_out_tokens:,} held out "
        f"({report.held_out_files} of {report.files} files)"
    )


def save_model(
    run: Pretraining, args: argparse.Namespace, prompt: list[int], hf_config: dict[str, Any] | None
) -> str:
    """Export with a sample of greedy text; returns the sample."""
    written = sample(run.params, prompt, args.sample_tokens, 0.0, args.seed)
    text = run.corpus.tokenizer.decode(written)
    card = LMCard(
        name=args.out.name,
        device=jax.devices()[0].device_kind,
        command=typed_command(),
        license_note=args.license_note,
        sample=text,
    )
    export(run, card, args.out, hf_config)
    return text


def train(args: argparse.Namespace, console: Console, started: float) -> None:
    config = train_config(args)
    if args.sample_tokens < 0:
        raise ValueError(f"--sample-tokens must be at least 0, got {args.sample_tokens}")
    console.print("reading and tokenizing --data")
    vocabulary = _vocabulary(args)
    corpus = data.build_corpus(args.data, args.work, vocabulary, suffixes=tuple(args.suffixes))
    print_corpus(console, corpus.report)
    prompt = corpus.tokenizer.encode(args.prompt).ids
    if not prompt:
        raise ValueError("--prompt is empty")
    model, hf_config = model_config(args, corpus.vocabulary)
    schedule = schedule_of(args, started, EXPORT_SHARE)
    run = Pretraining(
        model,
        config,
        corpus,
        schedule,
        args.work,
        args.resume,
        data_parallel=jax.device_count(),
        sample_length=len(prompt) + args.sample_tokens,
    )
    console.print(
        f"{num_parameters(run.params):,} parameters, {config.attention} attention, "
        f"{config.compute_dtype}, {jax.device_count()} x {jax.devices()[0].device_kind}, "
        f"{time.monotonic() - started:.1f} s so far"
    )
    text = None
    for record in follow(run.run, describe, console, started):
        if record.saved:
            text = save_model(run, args, prompt, hf_config)
    console.print(text or save_model(run, args, prompt, hf_config), markup=False, highlight=False)
    console.print(f"{args.out}: written after {time.monotonic() - started:.1f} s")


def run(args: argparse.Namespace) -> None:
    train(args, Console(soft_wrap=True), time.monotonic())


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
