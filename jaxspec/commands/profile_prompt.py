"""Profile the reading of prompts: which kernels run, for which part of the model, and how long.

The prompts of a model shape with random weights (see bench engine) are read several times, the last
time under the profiler. Each kernel is attributed to the part of the model (jax.named_scope) that
the compiled program gives it. Time that overlaps with earlier kernels is not counted, so that the
kernels' times and the gaps, in which nothing ran, add up to the whole.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.run_facts import config_facts, run_facts
from jaxspec.commands.shared.shape_bench import shape_bench
from jaxspec.commands.shared.shape_options import add_shape_options, check_head_options
from jaxspec.commands.shared.shell import (
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.evaluation.benchmarks.hlo import Program
from jaxspec.evaluation.benchmarks.modes import parse_mode
from jaxspec.evaluation.benchmarks.profile import record
from jaxspec.evaluation.benchmarks.prompt_profile import profile_prompt
from jaxspec.evaluation.benchmarks.timing import timed
from jaxspec.parallel import check_divides

TIMES = 3  # calls without the profiler
LEAST_SHARE = 0.002  # of the time, of a line of the table
TABLE_WIDTH = 110  # where the output is not a terminal


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("profile-prompt", __doc__)
    add = parser.add_argument
    add_shape_options(parser)
    add("--mode", default="plain", help="plain, chain:K or NODES:DEPTH:TOPK: what drafts reads the "
        "prompts, too")  # fmt: skip
    add("--batch", type=number, default=1, help="number of sequences")
    add("--chunk", type=number, help="prompt tokens of a sequence in a call (default: at most 512)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and cache")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def measure(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    """Results for the table and JSON."""
    check_head_options(make_parser(), args, [parse_mode(args.mode)])
    check_divides("--page-size", args.page_size, max(args.sp, 1))
    bench = shape_bench(args, 1, progress, args.chunk)
    progress.print("compiling, and warming up")
    jax.block_until_ready(bench.fill(bench.new_state()))
    seconds = [timed(bench.fill, bench.new_state())[1] for _ in range(TIMES)]
    progress.print("profiling")
    state = bench.new_state()
    events = record(lambda: bench.fill(state))
    profile = profile_prompt(events, Program(bench.prompt_program_text()))
    return {
        **run_facts(),
        "pallas_kernels": str(bench.params.kernels),
        "arguments": vars(args),
        "config": config_facts(bench.params.target.config),
        "chunk": bench.chunk,
        "unprofiled_us": 1e6 * statistics.median(seconds),
        **dataclasses.asdict(profile),
    }


def make_table(results: dict[str, Any]) -> Table:
    args, length_us = results["arguments"], results["length_us"]
    layers = f"{args['layers']} layers, " if args["layers"] else ""
    title = (
        f"{args['shape']}, {layers}{args['dtype']}, {args['mode']}: {args['context']} tokens of "
        f"{args['batch']} prompts, {results['chunk']} a call, {device_line(results)}"
    )
    caption = (
        f"{length_us:,.0f} us, {results['unprofiled_us']:,.0f} without the profiler\n"
        f"kernels: {results['pallas_kernels']}\n{results['command']}"
    )
    table = left_table(title, caption, left=("part", "kernel"), right=("us", "%", "launches"))

    def add(part: str, kernel: str, us: float, launches: int | None) -> None:
        count = "" if launches is None else f"{launches:,}"
        table.add_row(part, kernel, f"{us:,.0f}", f"{100 * us / length_us:.1f}", count)

    def by_part(kernel: dict[str, Any]) -> str:
        return kernel["part"]

    grouped = itertools.groupby(sorted(results["kernels"], key=by_part), by_part)
    parts = {part: list(kernels) for part, kernels in grouped}
    for part, kernels in sorted(parts.items(), key=lambda item: -_us(item[1])):
        add(part, "", _us(kernels), sum(kernel["launches"] for kernel in kernels))
        for kernel in kernels if len(kernels) > 1 else ():
            if kernel["us"] >= LEAST_SHARE * length_us:
                add("", kernel["kernel"], kernel["us"], kernel["launches"])
    add("gaps", "", results["gaps_us"], None)
    return table


def _us(kernels: Sequence[dict[str, Any]]) -> float:
    return sum(kernel["us"] for kernel in kernels)


def run(args: argparse.Namespace) -> None:
    results = measure(args, progress_console())
    show_results(results, make_table(results), as_json=args.json, width=TABLE_WIDTH)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
