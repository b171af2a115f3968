"""Train a draft head on a new domain while it serves it, and measure its acceptance.

The head is trained on the text of every served batch, and drafts the next batch with its new
weights. The text itself does not depend on them. Acceptance is measured before and after on
held-out files of --data, and on every batch served.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from jaxspec import BUILT_IN_HEAD, LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.eagle import save_eagle_head
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
)
from jaxspec.commands.shared.training_options import add_suffixes_option
from jaxspec.config.engine import EngineConfig
from jaxspec.evaluation.acceptance import Acceptance, measure_acceptance, summarize
from jaxspec.training.heads.data import Examples, read_examples
from jaxspec.training.heads.loss import LossConfig
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.online import HeadAdapter, learning_drafter
from jaxspec.training.precision import cast_weights


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("adapt-drafter", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default=str(BUILT_IN_HEAD), help="directory or hub id of an EAGLE head "
        "(default: the built-in one)")  # fmt: skip
    add("--data", type=Path, nargs="+", required=True, help="folders or files of the new domain")
    add_suffixes_option(parser)
    add("--mode", default="chain:5", help="chain:K or NODES:DEPTH:TOPK")
    add("--batch", type=number, default=16, help="requests decoded together; rows of a training "
        "step")  # fmt: skip
    add("--batches", type=number, default=40, help="batches served")
    add("--steps-per-batch", type=number, default=4, help="training steps after each batch")
    add("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    add("--max-tokens", type=int, default=128, help="new tokens of each prompt")
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    add("--held-out", type=number, default=32, help="prompts to measure before and after")
    add("--unroll", type=int, default=4, help="steps of the training-time test")
    add("--lr", type=float, default=5e-4, help="highest learning rate")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--dtype", choices=("float32", "bfloat16"), help="(default: float32 on CPU, else bfloat16)")
    add("--out", type=Path, help="export the adapted head to this folder")
    add("--plot", type=Path, help="write the acceptance length by batch as a PNG")
    add("--json", action="store_true", help="JSON on stdout, the summary on stderr")
    return parser


def adapt(args: argparse.Namespace, progress: Console) -> tuple[dict[str, Any], HeadAdapter]:
    length = args.prompt_tokens + args.max_tokens
    llm = LLM(
        args.model,
        args.drafter,
        speculation=SpeculationConfig.parse(args.mode),
        dtype=args.dtype,
        max_length=length,
        engine=EngineConfig(max_rows=args.batch),
    )
    head = learning_drafter(llm.params.drafter).head
    config = DraftTrainConfig(
        loss=LossConfig.for_method(head.method, args.unroll),
        batch_size=args.batch,
        learning_rate=args.lr,
        warmup_steps=args.steps_per_batch,
        seed=args.seed,
        compute_dtype=str(llm.params.target.embed.dtype),  # pyright: ignore[reportArgumentType]
    )
    adapter = HeadAdapter(llm, config, length=length)
    sampling = SamplingParams(
        temperature=args.temperature,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop_token_ids=(),
    )
    train, held_out, report = read_examples(
        args.data,
        llm.tokenizer,
        length,
        prompt_tokens=args.prompt_tokens,
        suffixes=tuple(args.suffixes),
    )
    progress.print(str(report))
    prompts = held_out.spread(args.held_out).prompts()
    progress.print(f"measuring acceptance on {len(prompts)} held-out prompts; compiling first")
    before = measure_acceptance(llm, prompts, sampling)
    served = serve(args, llm, adapter, train, sampling, progress)
    progress.print("measuring acceptance again")
    after = measure_acceptance(llm, prompts, sampling)
    return {
        "model": str(args.model),
        "drafter": str(args.drafter),
        "device": jax.devices()[0].device_kind,
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "served": served,
    }, adapter


def serve(
    args: argparse.Namespace,
    llm: LLM,
    adapter: HeadAdapter,
    train: Examples,
    sampling: SamplingParams,
    progress: Console,
) -> list[dict[str, float]]:
    """Serve batches of the training prompts and train after each; returns a record per batch."""
    prompts = train.spread(args.batch * args.batches).prompts()
    order = np.random.default_rng(args.seed).permutation(len(prompts))
    records = []
    for index in track(range(args.batches), "serving and learning", console=progress):
        rows = [order[(index * args.batch + row) % len(order)] for row in range(args.batch)]
        completions = llm.generate([prompts[row] for row in rows], sampling)
        started = time.perf_counter()
        learned = adapter.learn(completions, args.steps_per_batch)
        seconds = time.perf_counter() - started
        length = summarize(completions).length
        records.append({"acceptance_length": length, "training_seconds": seconds, **learned})
    return records


def summary(results: dict[str, Any]) -> str:
    lines = []
    for when in ("before", "after"):
        found = Acceptance(**results[when])
        low, high = found.length_interval
        depths = " ".join(f"{share:.0%}" for share in found.by_depth)
        lines.append(
            f"{when}: acceptance length {found.length:.2f} ({low:.2f} to {high:.2f}), "
            f"by depth {depths}, over {found.prompts} held-out prompts"
        )
    return "\n".join(lines)


def plot_served(results: dict[str, Any], path: Path) -> None:
    """Acceptance length of each served batch; dashed lines: held-out prompts, before and after."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([record["acceptance_length"] for record in results["served"]], ".-", label="served")
    for when, color in (("before", "C1"), ("after", "C2")):
        label = f"held out, {when}"
        axes.axhline(results[when]["length"], color=color, linestyle="--", label=label)
    axes.set(xlabel="batch served", ylabel="acceptance length")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def write_files(args: argparse.Namespace, results: dict[str, Any], adapter: HeadAdapter) -> None:
    if args.out is not None:
        head = cast_weights(adapter.state.head, jnp.bfloat16)
        save_eagle_head(head, args.out, adapter.serving.params.target.config)
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_served(results, args.plot)


def run(args: argparse.Namespace) -> None:
    results, adapter = adapt(args, progress_console())
    print(summary(results), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(results))
    write_files(args, results, adapter)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
