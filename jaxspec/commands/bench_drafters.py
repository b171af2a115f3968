"""Measure the speed-up of drafters over plain decoding, with real text, for each batch size.

After a warm-up, every batch of held-out prompts is decoded plainly and with each --run; medians
over the batches are reported. A run is a drafter (as in generate) and a mode, `chain:K` or
`NODES:DEPTH:TOPK`. All texts have --max-tokens tokens: stop tokens do not end them.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.commands.data_options import add_suffixes_option
from jaxspec.commands.shell import (
    JSON_PARTS,
    add_model_option,
    collect_parts,
    command_parser,
    progress_console,
    run_command,
    table_console,
)
from jaxspec.comparison import race
from jaxspec.config.engine import EngineConfig
from jaxspec.loading import MIXED, SUFFIX_MIXED, choose_drafter
from jaxspec.tokenizer import load_tokenizer
from jaxspec.training.draft_data import held_out_prompts

DEFAULT_RUNS = (("ngram", "chain:5"), ("auto", "chain:5"))
TABLE_WIDTH = 110  # where the output is not a terminal


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench drafters", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--data", type=Path, nargs="+", required=True, help="folders, text or .jsonl files, named "
        "as in training: a file is held out by the hash of its name below them")  # fmt: skip
    add_suffixes_option(parser)
    add(
        "--run",
        nargs=2,
        action="append",
        metavar=("DRAFTER", "MODE"),
        help="may be repeated (default: ngram and the default drafter, each with chain:5)",
    )
    add("--batch", type=int, nargs="+", default=[1], help="batch sizes")
    add("--batches", type=int, default=6, help="batches of each size")
    add("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    add("--max-tokens", type=int, default=192, help="new tokens of each prompt")
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    add("--top-p", type=float, default=1.0, help="probability kept in sampling; 1 keeps all")
    add("--acceptance", choices=("match", "rejection"), default="match", help="acceptance rule")
    add("--verify-width", type=int, help="nodes that every verification is padded to, plain "
        "decoding's too, so that all round alike (default: not padded)")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16"), help="(default: float32 on CPU, else bfloat16)")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--plot", type=Path, help="write the speed-ups as a PNG")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


def make_llm(args: argparse.Namespace, drafter: str, mode: str) -> LLM:
    speculation = dataclasses.replace(
        SpeculationConfig.parse(mode), acceptance=args.acceptance, verify_width=args.verify_width
    )
    return LLM(
        args.model,
        drafter,
        speculation=speculation,
        dtype=args.dtype,
        max_length=args.prompt_tokens + args.max_tokens,
        engine=EngineConfig(max_rows=max(args.batch)),
    )


def measure(args: argparse.Namespace, progress: Console) -> Iterator[dict[str, Any]]:
    """One batch size after the other."""
    if min(*args.batch, args.batches) < 1:
        raise ValueError("--batch and --batches must be at least 1")
    prompts, report = held_out_prompts(
        args.data,
        load_tokenizer(args.model),
        max(args.batch) * args.batches,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        suffixes=tuple(args.suffixes),
    )
    progress.print(str(report))
    if len(prompts) < max(args.batch):
        raise ValueError(f"{len(prompts)} held-out rows are fewer than one batch: give more --data")
    runs = [("none", "chain:1"), *map(tuple, args.run or DEFAULT_RUNS)]
    if "none" in [drafter for drafter, _ in runs[1:]] or len(set(runs)) < len(runs):
        raise ValueError("each --run names another drafter or mode; plain decoding is always there")
    with progress.status("loading"):
        engines = [make_llm(args, drafter, mode) for drafter, mode in runs]
    sampling = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop_token_ids=(),
    )
    facts = {
        "model": str(args.model),
        "device": jax.devices()[0].device_kind,
        "dtype": str(engines[0].params.target.embed.dtype),
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "acceptance": args.acceptance,
        "verify_width": args.verify_width,
        "seed": args.seed,
    }
    for size in args.batch:
        rows = []
        batches = [prompts[i : i + size] for i in range(0, len(prompts) - size + 1, size)]
        with progress.status(f"batch {size}"):
            paces = race(engines, batches[: args.batches], sampling)
        for (drafter, mode), pace in zip(runs, paces, strict=True):
            setting = {"batch": size, "drafter": str(choose_drafter(args.model, drafter))}
            setting["mode"] = "plain" if drafter == "none" else mode
            rows.append(setting | dataclasses.asdict(pace))
        yield facts | {"rows": rows}


def label(row: dict[str, Any]) -> str:
    if row["mode"] == "plain":
        return "plain"
    mixed = next((m for m in (MIXED, SUFFIX_MIXED) if row["drafter"].startswith(m)), "")
    return f"{mixed}{Path(row['drafter']).name.removeprefix(mixed)} {row['mode']}"


def make_table(results: dict[str, Any]) -> Table:
    table = Table(
        title=f"{Path(results['model']).name}, {results['dtype']}, temperature "
        f"{results['temperature']:g}, on {results['device']}"
    )
    for name in ("batch", "drafter", "tokens/s", "speed-up", "acceptance length", "identical"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for row in results["rows"]:
        table.add_row(
            str(row["batch"]),
            label(row),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            f"{row['identical']} of {row['texts']}",
        )
    return table


def plot_speedups(results: dict[str, Any], path: Path) -> None:
    """Bars of speed-up over plain decoding, grouped by batch size."""
    rows = [row for row in results["rows"] if row["mode"] != "plain"]
    sizes = list(dict.fromkeys(row["batch"] for row in rows))
    runs = list(dict.fromkeys((row["drafter"], row["mode"]) for row in rows))
    figure = Figure(figsize=(5 + 0.5 * len(sizes) * len(runs), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(runs)
    for index, run in enumerate(runs):
        own = [row for row in rows if (row["drafter"], row["mode"]) == run]  # in order of sizes
        places = [group + (index - (len(runs) - 1) / 2) * width for group in range(len(sizes))]
        bars = axes.bar(places, [row["speedup"] for row in own], width, label=label(own[0]))
        axes.bar_label(bars, fmt="%.2f", fontsize="small")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    axes.set(ylabel="speed-up over plain decoding", title=make_table(results).title)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> None:
    results = collect_parts(measure(args, progress_console()), "rows", as_json=args.json)
    table_console(stderr=args.json, width=TABLE_WIDTH).print(make_table(results))
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_speedups(results, args.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
