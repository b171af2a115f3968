"""Time plain decoding, chains and trees of a public model shape, on random weights.

Draft tokens are accepted at a fixed mean length ("synthetic" acceptance), so that the speed of a
round can be measured without a checkpoint; the text means nothing. Modes are `plain`, `chain:K`
and `NODES:DEPTH:TOPK` (root included); the latter two may end in `@ACCEPTANCE_LENGTH` and draft
with an EAGLE-3 head, or the MTP layer of a shape that has one (see `--draft-head`), whose matrices
are 8-bit integers after a further `+int8`. Every figure stands beside the memory floor: the bytes
that a round must read, divided by the bandwidth measured in the same run. Of experts those count
that rounds read, which are counted after the timed calls; on several devices those that tokens
would choose independently.
"""

import argparse
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.option_types import number, numbers
from jaxspec.commands.shared.run_facts import config_facts, run_facts
from jaxspec.commands.shared.shape_options import add_shape_options, check_head_options
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
from jaxspec.evaluation.benchmarks.compiling import compile_side_by_side
from jaxspec.evaluation.benchmarks.modes import Mode, make_params, parse_modes
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.rounds import SAMPLING, Bench, Timing, Workload, time_mode
from jaxspec.evaluation.benchmarks.shapes import model_shape
from jaxspec.evaluation.benchmarks.timing import Bandwidth, measure_bandwidth
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.quantized.kv_cache import with_float8_cache
from jaxspec.parallel import grid_of, replica_meshes
from jaxspec.parallel.bytes import gigabytes, local_bytes
from pallas_kernels.selection import Kernels

MOST_JOBS = 8  # modes compiled at a time
DEFAULT_MODES = "plain,chain:3,chain:5,tree:60:7:10"
# The table's columns, and what their cells show of a timing.
COLUMNS = {
    "mode": "{mode}",
    "batch": "{batch}",
    "context": "{first_context:.0f}-{last_context:.0f}",
    "prefill ms": "{prefill_ms:.1f}",
    "ms/round": "{round_ms:.3f}",
    "tokens/round": "{acceptance_length:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "floor GB": "{floor_gb:.3g}",
    "floor ms": "{floor_ms:.3f}",
    "% of floor": "{share_of_floor:.0%}",
}
OF_EXPERTS = {"experts read": "{experts_read:.1f}", "expected": "{expected:.1f}"}
# Titles of what is quantized.
QUANTIZED = {
    "quantization": "weights",
    "lm_head_quantization": "LM head",
    "drafter_quantization": "head",
    "expert_format": "experts",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench engine", __doc__)
    add = parser.add_argument
    add_shape_options(parser, contexts=True)
    add("--modes", default=DEFAULT_MODES, help="modes, separated by commas")
    add("--batch", type=numbers, default=(1,), help="batch sizes, separated by commas")
    add("--new-tokens", type=number, default=256, help="new tokens of a sequence in a timed call")
    add("--chunk", type=number, help="prompt tokens of a sequence in a call (default: at most 512)")
    add(
        "--random-cache",
        action="store_true",
        help="read the last chunk of each prompt alone, "
        "with random numbers in the cache for what is before it: long prompts take seconds to read",
    )
    add("--repeats", type=number, default=5, help="timed calls; the median is reported")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and cache")
    add("--sampling", choices=SAMPLING, default="greedy", help="how rows sample; anything but "
        "greedy times the general sampling program")  # fmt: skip
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


def choose(args: argparse.Namespace) -> list[tuple[Workload, Mode]]:
    """The workloads and modes to time. Raises ValueError for options that do not go together."""
    config = model_shape(args.shape, args.layers)
    modes = parse_modes(args.modes)
    check_head_options(make_parser(), args, modes)
    chosen, problems = [], Problems()
    for context, batch, mode in itertools.product(args.context, args.batch, modes):
        workload = Workload(
            batch=batch,
            context=context,
            rounds=mode.rounds(args.new_tokens),
            page_size=args.page_size,
            repeats=args.repeats,
            sampling=args.sampling,
            chunk=args.chunk,
            random_cache=args.random_cache,
        )
        with problems.caught():
            workload.check_fits(mode, config)
        chosen.append((workload, mode))
    problems.raise_all()
    return chosen


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One timing after the other, each with what is needed to read it later; the model's config
    stands with the first."""
    x, y = grid_of(args.tp)
    config = model_shape(args.shape, args.layers)
    chosen, kernels = choose(args), Kernels.parse(args.kernels, sharing=x * y * args.sp)
    on_cpu = jax.default_backend() == "cpu"
    console.print("measuring the memory bandwidth")
    bandwidth = measure_bandwidth((64 << 20) if on_cpu else (2 << 30))
    facts = {
        **run_facts(),
        "pallas_kernels": str(kernels),
        "arguments": vars(args),
        "bandwidth": dataclasses.asdict(bandwidth),
    }
    model = {"config": config_facts(config)}  # in the first part alone
    for timing in measure_modes(args, config, console, chosen, kernels):
        memory = jax.devices()[0].memory_stats() or {}
        peak = {"peak_bytes": memory.get("peak_bytes_in_use")}
        yield facts | model | peak | {"timings": [as_row(timing, bandwidth)]}
        model = {}


def measure_modes(
    args: argparse.Namespace,
    config: ModelConfig,
    console: Console,
    chosen: Sequence[tuple[Workload, Mode]],
    kernels: Kernels,
) -> Iterator[Timing]:
    [mesh] = replica_meshes(1, args.tp, args.sp)
    dtype = jnp.dtype(args.dtype)
    console.print(f"making random weights of {args.shape}")
    schemes = args.quantization, args.lm_head_quantization
    experts = args.expert_format
    target, head = random_decoder(config, dtype, mesh, 0, *schemes, experts), None
    if any(mode.speculation for _, mode in chosen):
        scheme = args.drafter_quantization
        head = random_head(
            config,
            dtype,
            mesh,
            1,
            kind=args.draft_head,
            quantization=scheme,
            expert_format=experts,
        )
    jax.block_until_ready((target, head))
    console.print(f"{gigabytes(local_bytes((target, head)))} of weights a device")
    if args.kv_dtype is not None:
        target, head = with_float8_cache((target, head), mesh)
    for bench in compile_all(chosen, target, head, mesh, kernels, console):
        name = _named(bench.workload, bench.mode)
        yield time_mode(bench, lambda text, name=name: console.print(f"{name}: {text}"))


def compile_all(
    chosen: Sequence[tuple[Workload, Mode]],
    target: Decoder,
    head: DraftHead | BlockHead | None,
    mesh: Mesh | None,
    kernels: Kernels,
    console: Console,
) -> list[Bench]:
    """All programs, compiled side by side before anything is timed."""
    one_state = threading.Lock()

    def compiled(case: tuple[Workload, Mode]) -> Bench:
        workload, mode = case
        params = make_params(mode, target, head, mesh, kernels)
        return Bench(mode, params, workload, one_state).compile_all()

    def name(case: tuple[Workload, Mode]) -> str:
        return _named(*case)

    return compile_side_by_side(compiled, chosen, name, MOST_JOBS, console.print)


def _named(workload: Workload, mode: Mode) -> str:
    return f"{mode.name}, batch {workload.batch}, context {workload.context}"


def as_row(timing: Timing, bandwidth: Bandwidth) -> dict[str, Any]:
    floor_ms = 1e3 * timing.floor.total / bandwidth.best
    return dataclasses.asdict(timing) | {
        "experts_read": None if timing.chosen is None else timing.chosen.of_a_layer,
        "floor_gb": timing.floor.total / 1e9,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / timing.round_ms,
    }


def make_tables(results: dict[str, Any]) -> list[Table]:
    arguments, bandwidth = results["arguments"], results["bandwidth"]
    layers = f"{arguments['layers']} layers, " if arguments["layers"] else ""
    given = {name: arguments[key] for key, name in QUANTIZED.items() if arguments[key]}
    quantized = "".join(f"{name} {scheme}, " for name, scheme in given.items())
    title = (
        f"{arguments['shape']}, {layers}{arguments['dtype']}, {quantized}"
        f"tp {arguments['tp']}, sp {arguments['sp']}, "
        f"{device_line(results)}"
    )
    prompts = "; prefill: of the last chunk of each prompt" if arguments["random_cache"] else ""
    caption = (
        f"sampling: {arguments['sampling']}; kernels: {results['pallas_kernels']}{prompts}\n"
        f"memory: {bandwidth['copy'] / 1e12:.3f} TB/s copied (x + 1), "
        f"{bandwidth['read'] / 1e12:.3f} TB/s read (sum); the floor takes the larger\n"
        f"{results['command']}"
    )
    has_experts = any(row["expected"] for row in results["timings"])
    columns = COLUMNS | OF_EXPERTS if has_experts else COLUMNS
    table = left_table(title, caption, right=columns)
    add_rows(table, columns.values(), results["timings"])
    return [table]


def run(args: argparse.Namespace) -> None:
    parts = measure(args, progress_console())
    show_parts(parts, "timings", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
