"""Measure scales for 8-bit keys and values, and what an 8-bit cache costs in perplexity.

Half of the held-out rows are read to find the largest key and value of each KV head. The other half
is scored with a cache of the weights' dtype, with an 8-bit one whose scales are 1, and with the
measured scales, each time by reading it through the cache. --out writes the scales to a file for
--kv-scales of generate and serve.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxspec import LLM
from jaxspec.checkpoints.kv_scale_file import KVScaleFile
from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.commands.shared.engine_options import AUTO_DRAFTER_HELP
from jaxspec.commands.shared.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.commands.shared.training_options import add_data_options, read_prompts
from jaxspec.config.engine import EngineConfig
from jaxspec.evaluation.number_format import span
from jaxspec.evaluation.perplexity import difference, summarize
from jaxspec.models.quantized.kv_cache import FP8
from jaxspec.quantize.kv_calibration import MARGIN, NEW_TOKENS, measured_scales, scores


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("kv-scales", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help=f"it gets scales, too: {AUTO_DRAFTER_HELP}")
    add_data_options(parser)
    add("--rows", type=int, default=64, help="held-out rows; every second one is scored")
    add("--tokens", type=int, default=512, help="tokens of a row")
    add("--margin", type=float, default=MARGIN, help="margin above the largest entry that is seen")
    add("--batch", type=int, default=8, help="rows read together")
    add("--dtype", choices=("float32", "bfloat16"), help="(default: float32 on CPU, else bfloat16)")
    add("--out", type=Path, metavar="FILE", help="write the scales")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def measure(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    check(args)
    rows, _ = read_prompts(args, args.rows, args.tokens, 1, progress)
    read, scored = rows[::2], rows[1::2]
    if not scored:
        raise ValueError("there is one held-out row only: give more --data")
    progress.print(f"reading {len(read)} rows for the scales")
    scales = measured_scales(make_llm(args, args.drafter), read, args.margin)
    about = {"model": str(args.model), "drafter": str(args.drafter), "margin": args.margin}
    if args.out is not None:
        scales.write(args.out, **about)
    results = compare(args, scored, scales, progress)
    return about | {"device": jax.devices()[0].device_kind, "results": results}


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for bad values, before anything is loaded."""
    if args.rows < 2 or args.tokens < 2:
        raise ValueError("--rows and --tokens must be at least 2")
    if not args.margin >= 1:
        raise ValueError(f"--margin must be at least 1, got {args.margin}")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"no directory {args.out.parent}")


def make_llm(
    args: argparse.Namespace,
    drafter: str,
    kv_dtype: str | None = None,
    kv_scales: KVScaleFile | None = None,
) -> LLM:
    return LLM(
        args.model,
        drafter,
        dtype=args.dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        max_length=args.tokens + NEW_TOKENS,
        engine=EngineConfig(max_rows=args.batch, prefix_caching=False),
    )


def compare(
    args: argparse.Namespace,
    rows: Sequence[Sequence[int]],
    scales: KVScaleFile,
    progress: Console,
) -> list[dict[str, Any]]:
    """The rows' perplexity with each cache, one model after the other."""
    results, wide = [], None
    for name, kv_dtype, scale_file in (
        (resolve_dtype(args.dtype).name, None, None),
        (f"{FP8}, scales of 1", FP8, None),
        (f"{FP8}, measured scales", FP8, scales),
    ):
        progress.print(f"scoring {len(rows)} rows, {name}")
        found = scores(make_llm(args, "none", kv_dtype, scale_file), rows)
        wide = found if wide is None else wide
        increase, interval = difference(wide, found)
        results.append(
            {
                "cache": name,
                "perplexity": summarize(found).perplexity,
                "loss_increase": increase,
                "interval": interval,
                "tokens": int(found.tokens.sum()),
            }
        )
    return results


def make_table(results: dict[str, Any]) -> Table:
    table = Table("cache", "perplexity", "loss increase, nats a token", "95 % interval", "tokens")
    for row in results["results"]:
        table.add_row(
            row["cache"],
            f"{row['perplexity']:.4f}",
            f"{row['loss_increase']:+.5f}",
            span(row["interval"], "+.5f"),
            str(row["tokens"]),
        )
    return table


def run(args: argparse.Namespace) -> None:
    results = measure(args, progress_console())
    show_results(results, make_table(results), as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
