"""Train a small language model from scratch on folders of text, and export it in HF format."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from jaxspec.config import ModelConfig, dense_model
from jaxspec.training import data
from jaxspec.training.lm import TrainConfig, num_parameters
from jaxspec.training.precision import resolve_precision
from jaxspec.training.pretrain import Pretraining, Record, sample
from jaxspec.training.progress import follow
from jaxspec.training.report import Card, export
from jaxspec.training.schedule import Schedule, deadline_of

EXPORT_SHARE = 0.05  # of a time budget, kept for the sample and the last export
DEFAULT_LICENSE = "Trained on the sources named above, each under its own licence."


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders or files of text")
    add("--out", type=Path, required=True, help="folder of the exported model")
    add("--work", type=Path, default=Path("runs/lm"), help="cached tokens, checkpoints, log")
    add("--suffixes", nargs="+", default=list(data.DEFAULT_SUFFIXES))
    add("--resume", action="store_true", help="go on from the last checkpoint in --work")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float, help="for everything, start-up and export too")
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=8)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--ff", type=int, default=448)
    add("--vocab", type=int, default=4096)
    add("--max-position", type=int, default=2048)
    add("--context", type=int, default=1024)
    add("--batch", type=int, default=128)
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=int, default=200)
    add("--seed", type=int, default=0)
    add("--attention", choices=("auto", "xla", "cudnn"), default="auto")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    add("--steps-per-call", type=int, default=20)
    add("--evaluate-every", type=int, default=500)
    add("--save-every", type=int, default=1000, help="steps between checkpoints and exports")
    add("--prompt", default='import numpy as np\n\n\ndef mean(x, axis=None):\n    """')
    add("--sample-tokens", type=int, default=128)
    add("--license-note", default=DEFAULT_LICENSE)
    return parser.parse_args(arguments)


def model_config(args: argparse.Namespace, vocab_size: int, end_of_text: int) -> ModelConfig:
    if args.context > args.max_position:
        raise ValueError(f"--context {args.context} exceeds --max-position {args.max_position}")
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


def train_config(args: argparse.Namespace) -> TrainConfig:
    dtype, attention = resolve_precision(args.dtype, args.attention, args.head_dim)
    return TrainConfig(
        batch_size=args.batch,
        context=args.context,
        learning_rate=args.lr,
        warmup_steps=args.warmup,
        seed=args.seed,
        attention=attention,
        compute_dtype=dtype,
    )


def describe(record: Record) -> str:
    """One line: step, losses, speed."""
    parts = [f"step {record.step}/{record.total_steps or '?'}"]
    if record.loss is not None:
        parts += [f"loss {record.loss:.4f}", f"|g| {record.grad_norm:.2f}"]
    if record.tokens_per_second:
        parts.append(f"{record.tokens_per_second / 1e3:.1f}k tok/s")
    if record.held_out_loss is not None:
        parts.append(f"held out {record.held_out_loss:.4f} = {record.bits_per_byte:.4f} bits/byte")
    return "  ".join(parts)


def print_corpus(console: Console, report: data.Report) -> None:
    for source, (files, size) in report.sources.items():
        console.print(f"{source}: {files} files, {size / 1e6:.1f} MB")
    console.print(f"skipped: {report.skipped}")
    console.print(
        f"{report.train_tokens:,} training tokens, {report.held_out_tokens:,} held out "
        f"({report.held_out_files} of {report.files} files)"
    )


def save_model(run: Pretraining, args: argparse.Namespace) -> str:
    """Export with a sample of greedy text; returns the sample."""
    tokenizer = run.corpus.tokenizer
    prompt = tokenizer.encode(args.prompt).ids
    if not prompt:
        raise ValueError("--prompt is empty")
    text = tokenizer.decode(sample(run.params, prompt, args.sample_tokens, 0.0, args.seed))
    device = jax.devices()[0].device_kind
    command = shlex.join(["python3", *sys.argv])
    card = Card(args.out.name, device, command, args.license_note, text)
    export(run, card, args.out)
    return text


def train(args: argparse.Namespace, console: Console, started: float) -> None:
    config = train_config(args)
    console.print("reading and tokenizing --data")
    corpus = data.build_corpus(args.data, args.work, args.vocab, suffixes=tuple(args.suffixes))
    print_corpus(console, corpus.report)
    end = data.end_of_text_id(corpus.tokenizer)
    model = model_config(args, corpus.tokenizer.get_vocab_size(), end)
    schedule = Schedule(
        steps=args.steps,
        deadline=deadline_of(started, args.minutes, 1 - EXPORT_SHARE),
        steps_per_call=args.steps_per_call,
        evaluate_every=args.evaluate_every,
        save_every=args.save_every,
    )
    run = Pretraining(
        model, config, corpus, schedule, args.work, args.resume, data_parallel=jax.device_count()
    )
    console.print(
        f"{num_parameters(run.params):,} parameters, {config.attention} attention, "
        f"{config.compute_dtype}, {jax.device_count()} x {jax.devices()[0].device_kind}, "
        f"{time.monotonic() - started:.1f} s so far"
    )
    text = None
    for record in follow(run.run, describe, console, started):
        if record.saved:
            text = save_model(run, args)
    console.print(text or save_model(run, args), markup=False, highlight=False)
    console.print(f"{args.out}: written after {time.monotonic() - started:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    try:
        train(parse_arguments(arguments), Console(soft_wrap=True), started)
    except (ValueError, OSError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
