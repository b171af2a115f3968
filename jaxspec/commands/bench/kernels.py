"""Time every kernel over its cases, beside its jnp reference (XLA) and a hardware lower bound.

Where the kernels are not supported, their references are timed in their place.

Calls are timed in a chain inside one program; each reads a result of the one before it. The data of
a chain exceed the GPU's cache, except for top_k, truncate and kv_compact: in the engine their data
are in the cache. The floor is the time that a call's bytes take at the copy bandwidth, or its FLOPs
at the rate of a large bfloat16 product, whichever is longer; both rates are measured in the same
run. Errors are ||out - exact|| / ||exact||, where exact is the reference in float32.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.option_types import number, positive
from jaxspec.commands.shared.run_facts import run_facts
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
from jaxspec.evaluation.benchmarks.compiling import compile_side_by_side
from jaxspec.evaluation.benchmarks.kernels import (
    KernelTiming,
    Peaks,
    Plan,
    compile_benchmark,
    time_benchmark,
)
from jaxspec.evaluation.benchmarks.timing import measure_bandwidth, measure_product_rate
from jaxspec.evaluation.number_format import or_blank
from pallas_kernels.add_rms_norm import cases as add_rms_norm
from pallas_kernels.benchmark import Benchmark
from pallas_kernels.delta_inputs import cases as delta_inputs
from pallas_kernels.delta_rule import cases as delta_rule
from pallas_kernels.expert_gate_up_down import cases as expert_gate_up_down
from pallas_kernels.expert_product import cases as expert_product
from pallas_kernels.gated_norm import cases as gated_norm
from pallas_kernels.kv_compact import cases as kv_compact
from pallas_kernels.latent_attention import cases as latent_attention
from pallas_kernels.o_gate_up_down import cases as o_gate_up_down
from pallas_kernels.packed_expert_product import cases as packed_expert_product
from pallas_kernels.packed_float_product import cases as packed_float_product
from pallas_kernels.packed_product import cases as packed_product
from pallas_kernels.paged_attention import cases as paged_attention
from pallas_kernels.paged_attention import large_head_cases as large_head_attention
from pallas_kernels.rope_kv_write import cases as rope_kv_write
from pallas_kernels.top_k import cases as top_k
from pallas_kernels.truncate import cases as truncate

OPERATIONS: Mapping[str, Callable[[], Sequence[Benchmark]]] = MappingProxyType(
    {
        "paged_attention": paged_attention.benchmarks,
        "float8_attention": paged_attention.float8_benchmarks,
        "partial_attention": paged_attention.partial_benchmarks,
        "large_head_attention": large_head_attention.benchmarks,
        "latent_attention": latent_attention.benchmarks,
        "rope_kv_write": rope_kv_write.benchmarks,
        "add_rms_norm": add_rms_norm.benchmarks,
        "kv_compact": kv_compact.benchmarks,
        "top_k": top_k.benchmarks,
        "truncate": truncate.benchmarks,
        "packed_product": packed_product.benchmarks,
        "expert_product": expert_product.benchmarks,
        "packed_expert_product": packed_expert_product.benchmarks,
        "packed_float_product": packed_float_product.benchmarks,
        "delta_rule": delta_rule.benchmarks,
        "delta_inputs": delta_inputs.benchmarks,
        "gated_norm": gated_norm.benchmarks,
        "o_gate_up_down": o_gate_up_down.benchmarks,
        "expert_gate_up_down": expert_gate_up_down.benchmarks,
    }
)
ROTATION_BYTES = 200 << 20  # four times an H100's L2 cache
MOST_JOBS = 12  # cases compiled at a time
TABLE_WIDTH = 170  # where the output is not a terminal: names of cases are long
# The table's columns, and what their cells show of a timing.
TEXTS = {"operation": "{operation}", "case": "{case}", "implementation": "{implementation}"}
FIGURES = {
    "us": "{us:.1f}",
    "XLA us": "{reference_us:.1f}",
    "GB/s": "{gb_per_s:,.0f}",
    "floor us": "{floor_us:.1f}",
    "bound": "{bound}",
    "% of floor": "{share_of_floor:.0%}",
    "error": "{error:.1e}",
    "XLA error": "{reference_error:.1e}",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench kernels", __doc__)
    add = parser.add_argument
    add("--only", action="append", metavar="TEXT", help="only cases whose 'operation: case' "
        "contains this text; may be given several times")  # fmt: skip
    add("--skip-reference", action="store_true", help="neither time the jnp reference nor compute "
        "errors: one program to compile for a case, not three")  # fmt: skip
    add("--repeats", type=number, default=5, help="timed programs of a case; the median is "
        "reported")  # fmt: skip
    add("--seconds", type=positive, default=0.02, help="approximate least duration of a timed "
        "program")  # fmt: skip
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


def measure(args: argparse.Namespace, progress: Console) -> Iterator[dict[str, Any]]:
    """One timing after the other, each with everything needed to read it later."""
    chosen = [
        (operation, benchmark)
        for operation, benchmarks in OPERATIONS.items()
        for benchmark in benchmarks()
        if any(text in f"{operation}: {benchmark.name}" for text in args.only or [""])
    ]
    if not chosen:
        raise ValueError(f"no case contains {' or '.join(map(repr, args.only))}")
    on_gpu = jax.default_backend() == "gpu"
    progress.print("measuring the memory bandwidth and a large product")
    peaks = Peaks(
        bandwidth=measure_bandwidth((2 << 30) if on_gpu else (8 << 20)).copy,
        product_rate=measure_product_rate(8192 if on_gpu else 128),
    )
    rotation_bytes = ROTATION_BYTES if on_gpu else 0
    plan = Plan(rotation_bytes, args.seconds, args.repeats, not args.skip_reference)
    facts = {**run_facts(), "arguments": vars(args), "peaks": dataclasses.asdict(peaks)}
    programs = compile_side_by_side(
        lambda case: compile_benchmark(case[1], peaks, plan),
        chosen,
        lambda case: f"{case[0]}: {case[1].name}",
        MOST_JOBS,
        progress.print,
    )
    for index, (compiled, (operation, benchmark)) in enumerate(zip(programs, chosen, strict=True)):
        row = as_row(operation, benchmark, time_benchmark(compiled, peaks, plan))
        progress.print(
            f"{index + 1}/{len(chosen)} {operation}: {row['case']}: {row['us']:.1f} us, "
            f"XLA {or_blank(row['reference_us'])}, floor {row['floor_us']:.1f}"
        )
        yield facts | {"timings": [row]}


def as_row(operation: str, benchmark: Benchmark, timing: KernelTiming) -> dict[str, Any]:
    us = {
        "us": timing.seconds,
        "reference_us": timing.reference_seconds,
        "floor_us": timing.floor_seconds,
    }
    return {
        "operation": operation,
        "case": benchmark.name,
        "implementation": benchmark.implementation,
        **{name: seconds and 1e6 * seconds for name, seconds in us.items()},
        "bytes": benchmark.num_bytes,
        "flops": benchmark.flops,
        "gb_per_s": 1e-9 * benchmark.num_bytes / timing.seconds,
        "tflop_per_s": 1e-12 * benchmark.flops / timing.seconds,
        "bound": timing.bound,
        "share_of_floor": timing.floor_seconds / timing.seconds,
        "error": timing.error,
        "reference_error": timing.reference_error,
    }


def make_tables(results: dict[str, Any]) -> list[Table]:
    peaks = results["peaks"]
    caption = (
        f"peaks: {peaks['bandwidth'] / 1e12:.3f} TB/s copied (x + 1), "
        f"{peaks['product_rate'] / 1e12:.3g} TFLOP/s (bfloat16 product)\n{results['command']}"
    )
    table = left_table(device_line(results), caption, left=TEXTS, right=FIGURES)
    add_rows(table, (*TEXTS.values(), *FIGURES.values()), results["timings"])
    return [table]


def run(args: argparse.Namespace) -> None:
    parts = measure(args, progress_console())
    show_parts(parts, "timings", make_tables, as_json=args.json, width=TABLE_WIDTH)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
