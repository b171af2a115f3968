"""Count what devices send to each other in each layer, by tensor parallelism of one and two
dimensions, and by sequence parallelism.

The counts are those of the programs that XLA compiles for H100s: a round of plain decoding, and the
reading of prompts. No GPU is needed, but the compiler from its wheels (see compile-ahead). Each
program is compiled for a model of one layer and for one of two; the difference is a layer's.
"""

import argparse
import dataclasses
import json
import math
import operator
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxspec.commands.shared.compiling_process import (
    add_compiler_options,
    run_compiling,
    run_or_compile,
)
from jaxspec.commands.shared.engine_options import add_sequence_parallel_option
from jaxspec.commands.shared.option_types import number, tensor_parallel
from jaxspec.commands.shared.shell import command_parser, left_table, show_results
from jaxspec.evaluation.benchmarks.ahead_of_time import (
    Job,
    Program,
    check_wheels,
    compile_ahead,
    compiler_environment,
    decode_program,
    make_devices,
    prefill_program,
)
from jaxspec.evaluation.benchmarks.collective_volume import parse_collectives, totals
from jaxspec.evaluation.benchmarks.modes import parse_mode
from jaxspec.evaluation.benchmarks.rounds import Workload
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.parallel import TensorParallel, grid_of, shown_size

GRIDS = "4,2x2,8,2x4,4x2"
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
PAGE_SIZE = 64

Counts = dict[str, tuple[int, float]]  # see collective_volume.totals


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench collectives", __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-3.1-8b", help="shape of the model")
    add("--grids", default=GRIDS, help="values of --tp to compare, separated by commas")
    add_sequence_parallel_option(parser)
    add("--batch", type=number, default=8, help="sequences that are decoded")
    add("--tokens", type=number, default=2048, help="tokens of the prompt that is read")
    add_compiler_options(parser)
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def parse_grids(text: str, sequence_parallel: int) -> list[TensorParallel]:
    """Values of ``--tp``. Raises ValueError for other text, and for one device."""
    try:
        grids = [tensor_parallel(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--grids: {error}") from None
    if any(math.prod(grid_of(grid)) * sequence_parallel < 2 for grid in grids):
        raise ValueError("--grids: each needs at least two devices, or nothing is sent")
    return grids


def count_here(args: argparse.Namespace) -> None:
    """Compile in this process, which was started in the compiler's environment, and print a line of
    JSON for each program."""
    jax.devices()  # makes the CPU the backend before the plugin is loaded
    for grid in parse_grids(args.grids, args.sp):
        for tokens, program, job in programs(args, grid):
            one_layer, two = (sent_by(program, job, layers) for layers in (1, 2))
            layer = difference(two, one_layer)
            line = {"tp": shown_size(grid), "tokens": tokens, "layer": layer}
            print(json.dumps(line), flush=True)


def difference(more: Counts, less: Counts) -> Counts:
    found = {}
    for kind, (times, sent) in more.items():
        fewer, less_sent = less.get(kind, (0, 0.0))
        found[kind] = times - fewer, sent - less_sent
    return found


def programs(
    args: argparse.Namespace, grid: TensorParallel
) -> Iterator[tuple[int, Callable[[Job, Sequence[Any]], Program], Job]]:
    """Number of tokens, and what is compiled: decoding, then the reading of a prompt."""
    decoding = Workload(args.batch, args.tokens, rounds=1, page_size=PAGE_SIZE, repeats=1)
    chunk = args.tokens  # a prompt is read in one call
    job = Job(SHAPES[args.shape], parse_mode("plain"), decoding, grid, args.sp, largest_chunk=chunk)
    yield args.batch, decode_program, job
    reading = dataclasses.replace(decoding, batch=1)
    yield args.tokens, prefill_program, dataclasses.replace(job, workload=reading)


def sent_by(program: Callable[[Job, Sequence[Any]], Program], job: Job, layers: int) -> Counts:
    """What devices send in a model with so many layers."""
    config = dataclasses.replace(job.config, layers=job.config.layers[:1] * layers)
    made = program(dataclasses.replace(job, config=config), make_devices(job.num_devices))
    return totals(parse_collectives(compile_ahead(made.function, made.arguments).as_text()))


def count_elsewhere(args: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Count in a new process. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="bench_collectives.") as folder:
        environment = compiler_environment(args.wheels, Path(folder), os.environ)
        command = ["bench", "collectives", *arguments]
        printed = run_compiling(command, environment, Path(folder) / "log.txt")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def make_table(counts: Sequence[dict[str, Any]], shape: str, sequence_parallel: int = 1) -> Table:
    shared = f", sp {sequence_parallel}" if sequence_parallel > 1 else ""
    headings = ("tokens", "--tp", *KINDS, "collectives", "KiB sent", "KiB a token")
    table = left_table(f"{shape}, bfloat16{shared}: a layer of one device", right=headings)
    for found in sorted(counts, key=operator.itemgetter("tokens")):
        layer = {kind: found["layer"].get(kind, (0, 0.0)) for kind in KINDS}
        parts = [f"{times}: {sent / 2**10:.1f}" for times, sent in layer.values()]
        total = sum(times for times, _ in layer.values())
        sent = sum(sent for _, sent in layer.values()) / 2**10
        each = f"{sent / found['tokens']:.2f}"
        table.add_row(str(found["tokens"]), found["tp"], *parts, str(total), f"{sent:.1f}", each)
    return table


def run(args: argparse.Namespace, arguments: Sequence[str]) -> None:
    if args.sp < 1:
        raise ValueError("--sp must be at least 1")
    parse_grids(args.grids, args.sp)
    check_wheels(args.wheels)
    counts = count_elsewhere(args, arguments)
    results = {"shape": args.shape, "sp": args.sp, "jax": jax.__version__, "counts": counts}
    show_results(results, make_table(counts, args.shape, args.sp), as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_or_compile(make_parser(), run, count_here, arguments)
