"""Time how long one prompt takes to be read, of a public model shape with random weights.

The time to the first token is that of the device's work, without a server. It stands beside the
additions and multiplications that reading takes, products with weights and attention, and the
share of the rate that large bfloat16 products reach in the same run.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.option_types import number, numbers
from jaxspec.commands.shared.run_facts import config_facts, run_facts
from jaxspec.commands.shared.shape_options import add_target_options
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_rows,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.checks import Problems
from jaxspec.config.model import ModelConfig
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.prompts import (
    PromptBench,
    Reading,
    ReadingTiming,
    num_devices,
    time_reading,
)
from jaxspec.evaluation.benchmarks.random_params import random_decoder
from jaxspec.evaluation.benchmarks.shapes import model_shape
from jaxspec.evaluation.benchmarks.timing import measure_product_rate
from jaxspec.models.quantized.kv_cache import with_float8_cache
from jaxspec.parallel import grid_of, replica_meshes
from pallas_kernels.selection import Kernels

# The table's columns, and what their cells show of a timing.
COLUMNS = {
    "tokens": "{tokens:,}",
    "a call": "{chunk:,}",
    "first token, ms": "{first_token_ms:,.1f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "TFLOP of products": "{product_tflop:,.3g}",
    "of attention": "{attention_tflop:,.3g}",
    "TFLOP/s": "{tflops:,.3g}",
    "% of peak": "{share_of_peak:.0%}",
    "first call, ms": "{first_chunk_ms:,.1f}",
    "last": "{last_chunk_ms:,.1f}",
    "attention, TFLOP/s": "{attention}",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench prompts", __doc__)
    add = parser.add_argument
    add_target_options(parser)
    add("--prompts", type=numbers, default=(2048, 32_768), help="tokens of a prompt, several "
        "separated by commas")  # fmt: skip
    add("--chunk", type=numbers, default=(2048,), help="most tokens that a call reads, several "
        "separated by commas; engines on GPUs read up to 2,048")  # fmt: skip
    add("--repeats", type=number, default=3, help="times that a prompt is read; the median is "
        "reported")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and cache")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


def choose(args: argparse.Namespace, config: ModelConfig) -> list[Reading]:
    """What is timed. Raises ValueError for prompts that the model has no positions for."""
    chosen, problems = [], Problems()
    for tokens, chunk in itertools.product(args.prompts, args.chunk):
        reading = Reading(tokens, min(chunk, tokens), args.page_size, args.repeats)
        with problems.caught():
            reading.check_fits(config)
        if reading not in chosen:
            chosen.append(reading)
    problems.raise_all()
    return chosen


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One timing after the other, each with what is needed to read it later; the model's config
    stands with the first."""
    config, (x, y) = model_shape(args.shape, args.layers), grid_of(args.tp)
    chosen, kernels = choose(args, config), Kernels.parse(args.kernels, sharing=x * y * args.sp)
    console.print("measuring the rate of products")
    peak = measure_product_rate(512 if jax.default_backend() == "cpu" else 8192)
    [mesh] = replica_meshes(1, args.tp, args.sp)
    console.print(f"making random weights of {args.shape}")
    schemes = args.quantization, args.lm_head_quantization, args.expert_format
    target = random_decoder(config, jnp.dtype(args.dtype), mesh, 0, *schemes)
    if args.kv_dtype is not None:
        target, _ = with_float8_cache((target, None), mesh)
    params = make_params(parse_mode("plain"), target, None, mesh, kernels)
    facts = {
        **run_facts(),
        "pallas_kernels": str(kernels),
        "arguments": vars(args),
        "peak_rate": peak,
    }
    model = {"config": config_facts(config)}  # in the first part alone
    for reading in chosen:
        console.print(f"{reading}: compiling")
        bench = PromptBench(params, reading)
        timing = time_reading(bench, lambda text, at=reading: console.print(f"{at}: {text}"))
        yield facts | model | {"timings": [as_row(timing, peak * num_devices(params))]}
        model = {}


def as_row(timing: ReadingTiming, peak: float) -> dict[str, Any]:
    """``peak``: operations a second of all devices together."""
    seconds = timing.first_token_ms / 1e3
    rate = timing.attention_rate
    return dataclasses.asdict(timing) | {
        "tokens_per_second": timing.tokens / seconds,
        "product_tflop": timing.work.products / 1e12,
        "attention_tflop": timing.work.attention / 1e12,
        "tflops": timing.work.total / seconds / 1e12,
        "share_of_peak": timing.work.total / seconds / peak,
        "attention": "-" if rate is None else f"{rate / 1e12:,.3g}",
    }


def make_tables(results: dict[str, Any]) -> list[Table]:
    arguments = results["arguments"]
    layers = f"{arguments['layers']} layers, " if arguments["layers"] else ""
    weights = f"weights {arguments['quantization']}, " if arguments["quantization"] else ""
    title = (
        f"{arguments['shape']}, {layers}{arguments['dtype']}, {weights}tp {arguments['tp']}, "
        f"sp {arguments['sp']}, {device_line(results)}"
    )
    caption = (
        f"kernels: {results['pallas_kernels']}; peak: {results['peak_rate'] / 1e12:.3g} TFLOP/s a "
        f"device, of large products\n{results['command']}"
    )
    table = left_table(title, caption, right=COLUMNS)
    add_rows(table, COLUMNS.values(), results["timings"])
    return [table]


def run(args: argparse.Namespace) -> None:
    parts = measure(args, progress_console())
    show_parts(parts, "timings", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
