"""Compile the decode program for H100s or TPUs on a machine without them, and report the result.

For H100s it reports launches inside and outside CUDA graphs, copies of KV pages, all-reduces, the
bytes that a device sends to others, memory, and the registers and spills of every Mosaic kernel.
With --program prefill it is the program that reads prompts. The compiler comes from wheels of
jaxlib's version, which are unpacked into a folder (730 MB) and not installed:

    V=$(python3 -c "import jaxlib; print(jaxlib.__version__)")
    pip install --target .cache/aot-wheels --no-deps jax-cuda13-pjrt==$V jax-cuda13-plugin==$V \\
        nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm

With --tpu, for example --tpu v6e:2x2, it compiles for TPUs, and reports memory, collectives, calls
of kernels, and copies of weights or KV pages into other layouts. Its compiler is libtpu (460 MB):

    pip install --target .cache/libtpu --no-deps "libtpu==0.0.48.*"   # of jax 0.11.2

Flags in XLA_FLAGS are passed on. Matrix products cannot be autotuned without the device, so XLA may
split some of them differently on a real GPU.
"""

import argparse
import dataclasses
import datetime
import os
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxspec.commands.shared.compiling_process import (
    add_compiler_options,
    run_compiling,
    run_or_compile,
)
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.shape_options import add_shape_options, check_head_options
from jaxspec.commands.shared.shell import command_parser, left_table, show_results
from jaxspec.evaluation.benchmarks import tpu_ahead
from jaxspec.evaluation.benchmarks.ahead_of_time import (
    PROGRAMS,
    Job,
    check_wheels,
    compile_program,
    compiler_environment,
    read_round,
)
from jaxspec.evaluation.benchmarks.compiled_round import CompiledRound
from jaxspec.evaluation.benchmarks.modes import parse_mode
from jaxspec.evaluation.benchmarks.rounds import LARGEST_CHUNK, Workload
from jaxspec.evaluation.benchmarks.shapes import model_shape
from jaxspec.evaluation.benchmarks.tpu_ahead import (
    TpuProgram,
    check_libtpu,
    libtpu_environment,
    read_program,
)
from jaxspec.parallel import check_divides, grid_of

NEW_TOKENS = 256  # slots for new tokens after the context, as in bench_engine
LOG = "log.txt"
TABLE_WIDTH = 100  # where the output is not a terminal


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("compile-ahead", __doc__)
    add = parser.add_argument
    add_shape_options(parser)
    add("--mode", default="chain:5", help="plain, chain:K or NODES:DEPTH:TOPK, the latter two with "
        "@ACCEPTANCE_LENGTH")  # fmt: skip
    add("--batch", type=number, default=1, help="number of sequences")
    add("--sampling", choices=("greedy", "general"), default="greedy", help="the program for "
        "greedy rows only, or the one for any sampling")  # fmt: skip
    add_compiler_options(parser)
    add("--tpu", metavar="TOPOLOGY", help="compile for TPUs of this topology, such as v5e:2x2")
    add("--program", choices=PROGRAMS, default="decode", help="rounds, or the reading of prompts")
    add("--chunk", type=number, help="prompt tokens of a sequence in a call of prefill, at most "
        f"(default: {LARGEST_CHUNK} for each device of --sp)")  # fmt: skip
    add("--libtpu", type=Path, default=Path(".cache/libtpu"), help="folder of the TPUs' compiler")
    add("--dump", type=Path, help="an empty folder to keep what the compiler writes")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError or FileNotFoundError for options that cannot be compiled."""
    config, mode = model_shape(args.shape, args.layers), parse_mode(args.mode)
    check_head_options(make_parser(), args, [mode])
    if min(*grid_of(args.tp), args.sp) < 1:
        raise ValueError("--tp and --sp must be at least 1")
    workload_of(args).check_fits(mode, config)
    check_divides("--page-size", args.page_size, args.sp)
    if args.chunk is not None and args.program != "prefill":
        raise ValueError("--chunk is of the reading of prompts: add --program prefill")
    if args.dump and args.dump.is_dir() and any(args.dump.iterdir()):
        raise ValueError(f"{args.dump} is not empty: name another folder with --dump")
    if args.tpu is not None:
        if args.sp > 1:
            raise ValueError("--sp is compiled for H100s only: leave out --tpu")
        check_libtpu(args.libtpu)
        return
    check_wheels(args.wheels)


def workload_of(args: argparse.Namespace) -> Workload:
    return Workload(
        batch=args.batch,
        context=args.context,
        rounds=parse_mode(args.mode).rounds(NEW_TOKENS),
        page_size=args.page_size,
        repeats=1,
        sampling=args.sampling,
    )


def compile_here(args: argparse.Namespace) -> None:
    """Compile in this process, which was started in the compiler's environment."""
    mode, workload = parse_mode(args.mode), workload_of(args)
    job = Job(
        model_shape(args.shape, args.layers),
        mode,
        workload,
        args.tp,
        args.sp,
        args.kernels,
        largest_chunk=args.chunk or LARGEST_CHUNK * args.sp,
        kv_dtype=args.kv_dtype,
        quantization=args.quantization,
        lm_head_quantization=args.lm_head_quantization,
        drafter_quantization=args.drafter_quantization,
        expert_format=args.expert_format,
        head=args.draft_head,
    )
    if args.tpu is None:
        compile_program(args.program, job, args.dump)
    else:
        tpu_ahead.compile_program(args.program, job, args.tpu, args.dump)


def compile_elsewhere(
    args: argparse.Namespace, arguments: Sequence[str]
) -> CompiledRound | TpuProgram:
    """Compile in a new process. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="compile_ahead.") as folder:
        dump = args.dump or Path(folder)
        dump.mkdir(parents=True, exist_ok=True)
        if args.tpu is None:
            environment = compiler_environment(args.wheels, dump, os.environ)
        else:
            environment = libtpu_environment(args.libtpu, os.environ)
        command = ["compile-ahead", *arguments, "--dump", str(dump)]
        advice = f" (--dump FOLDER keeps its {LOG})"
        printed = run_compiling(command, environment, dump / LOG, advice)
        return read_round(dump, printed) if args.tpu is None else read_program(dump)


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Compile for the options of a command line.

    The results have a CompiledRound as ``round``; with --tpu, a TpuProgram as ``program``.
    """
    args = make_parser().parse_args(arguments)
    check(args)
    started = time.perf_counter()
    compiled = compile_elsewhere(args, arguments)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["jaxspec", "compile-ahead", *arguments]),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "mode": parse_mode(args.mode).name,
        "layers": model_shape(args.shape, args.layers).num_layers,
        "seconds": time.perf_counter() - started,
        "target": f"{args.tpu or 'H100'}, {args.program}",
        "round" if args.tpu is None else "program": compiled,
    }


def make_table(results: dict[str, Any]) -> Table:
    table = left_table(
        f"{results['mode']}, {results['layers']} layers, jax {results['jax']}, "
        f"compiled for {results['target']} in {results['seconds']:.0f} s",
        results["command"],
        left=["of one round or call, on one device"],
        right=[""],
    )
    if "program" in results:
        add_tpu_rows(table, results["program"])
    else:
        add_gpu_rows(table, results["round"])
    return table


def listed(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{count} {name}" for name, count in counts.items()) or "0"


def add_gpu_rows(table: Table, compiled: CompiledRound) -> None:
    launches = compiled.launches
    graphs = "the loop is in one" if launches.loop_in_graph else str(launches.graphs)
    table.add_row("CUDA graphs", graphs)
    table.add_row("launches inside graphs", str(launches.in_graphs))
    table.add_row("launches outside, condition included", str(launches.outside))
    table.add_row("copies of KV pages", str(compiled.page_copies))
    table.add_row("all-reduces", listed(compiled.all_reduces))
    table.add_row("all-reduces inside graphs", str(launches.all_reduces_in_graphs))
    for kind, (count, sent) in compiled.sent.items():
        table.add_row(f"sent to other devices by {count} {kind}", f"{sent / 2**10:,.1f} KiB")
    table.add_row("arguments", f"{compiled.argument_bytes / 2**30:.3f} GiB")
    table.add_row("temporaries", f"{compiled.temporary_bytes / 2**20:.2f} MiB")
    for kernel in sorted(compiled.kernels, key=lambda kernel: (kernel.name, kernel.registers)):
        table.add_row(
            f"kernel {kernel.name}",
            f"{kernel.registers} registers, {kernel.spilled_bytes} bytes spilled",
        )


def add_tpu_rows(table: Table, compiled: TpuProgram) -> None:
    table.add_row("collectives", listed(compiled.collectives))
    table.add_row("calls of kernels", listed(compiled.kernels))
    table.add_row("copies of weights into another layout", str(compiled.weight_copies))
    table.add_row("copies of KV pages into another layout", str(compiled.page_copies))
    table.add_row("arguments", f"{compiled.argument_bytes / 2**30:.3f} GiB")
    table.add_row("temporaries", f"{compiled.temporary_bytes / 2**20:.2f} MiB")
    table.add_row("the program itself", f"{compiled.code_bytes / 2**20:.2f} MiB")
    table.add_row("GFLOP, kernels not counted", f"{compiled.flops / 1e9:,.1f}")
    table.add_row("GB accessed, kernels not counted", f"{compiled.bytes_accessed / 1e9:,.2f}")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> None:
    results = measure(arguments)
    key = "round" if args.tpu is None else "program"
    facts = results | {key: dataclasses.asdict(results[key])}
    show_results(facts, make_table(results), as_json=args.json, width=TABLE_WIDTH)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_or_compile(make_parser(), run, compile_here, arguments)
