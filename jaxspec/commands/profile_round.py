"""Profile one decoding round: the time of its phases (draft, verify, accept, compact) and gaps.

Two calls of a model shape with random weights and synthetic acceptance (see bench engine) run
under the profiler. Each kernel is attributed to the scope (jax.named_scope) that the compiled
program gives it: a fused kernel to the scope of the matrix product in it, else of its result. Time
that overlaps with earlier kernels is not counted, so that the kernels' times and the gaps, in which
nothing ran, add up to the round.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
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
from jaxspec.evaluation.benchmarks.hlo import LAYER_PARTS, OTHER, PARTS, PHASES, Program, Scope
from jaxspec.evaluation.benchmarks.modes import parse_mode
from jaxspec.evaluation.benchmarks.profile import (
    Cost,
    Profile,
    Round,
    profile_rounds,
    record,
    summarize,
)
from jaxspec.evaluation.benchmarks.rounds import Bench
from jaxspec.evaluation.benchmarks.timing import timed
from jaxspec.evaluation.number_format import or_blank
from jaxspec.parallel import check_divides

NUM_CALLS = 2  # calls under the profiler
LONG_CALL = 5  # a long call has so many times the rounds of a short one
PAIRS = 3  # pairs of a short and a long call, timed without the profiler
TABLE_WIDTH = 100  # where the output is not a terminal
LANES = (*PHASES, OTHER)


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("profile-round", __doc__)
    add = parser.add_argument
    add_shape_options(parser)
    add("--mode", default="chain:5", help="plain, chain:K or NODES:DEPTH:TOPK, the latter two with "
        "@ACCEPTANCE_LENGTH")  # fmt: skip
    add("--batch", type=number, default=1, help="number of sequences")
    add("--rounds", type=number, default=8, help="rounds in one call; all but the last are "
        "profiled")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and cache")
    add("--plot", type=Path, help="write one round's timeline as a PNG")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def check(args: argparse.Namespace) -> None:
    check_head_options(make_parser(), args, [parse_mode(args.mode)])
    if args.rounds < 2:
        raise ValueError("--rounds must be at least 2")
    check_divides("--page-size", args.page_size, max(args.sp, 1))
    if args.plot and not args.plot.parent.is_dir():
        raise ValueError(f"no directory {args.plot.parent}")


def profiled(bench: Bench, rounds: int) -> Profile:
    states = [bench.fill(bench.new_state())]

    def calls() -> None:
        for _ in range(NUM_CALLS):
            states.append(jax.block_until_ready(bench.decode(states.pop(), rounds)))

    return profile_rounds(record(calls), Program(bench.program_text()), rounds, NUM_CALLS)


def unprofiled_round_us(bench: Bench, rounds: int) -> float:
    """Microseconds per round, from a long call minus a short one: the fixed cost cancels out."""
    state = jax.block_until_ready(bench.fill(bench.new_state()))  # not part of the short call
    state, seconds = timed(bench.decode, state, rounds)
    _, long_seconds = timed(bench.decode, state, LONG_CALL * rounds)
    return 1e6 * (long_seconds - seconds) / ((LONG_CALL - 1) * rounds)


def measure(args: argparse.Namespace, progress: Console) -> tuple[Profile, dict[str, Any]]:
    """The profile, and results for the table and JSON."""
    check(args)
    bench = shape_bench(args, max(1 + LONG_CALL, NUM_CALLS) * args.rounds, progress)
    progress.print("compiling, and warming up")
    jax.block_until_ready(bench.decode(bench.fill(bench.new_state()), args.rounds))
    unprofiled_us = statistics.median(unprofiled_round_us(bench, args.rounds) for _ in range(PAIRS))
    progress.print("profiling")
    profile, params = profiled(bench, args.rounds), bench.params
    head, config = getattr(params.drafter, "head", None), params.target.config
    layer_runs = {
        "draft": params.speculation.max_depth * (len(head.layers) if head else 0),
        "verify": config.num_layers,
    }
    rounds = profile.rounds
    round_us = statistics.mean(round_.length_us for round_ in rounds)
    costs = summarize(rounds, lambda span: span.scope)
    kernels = summarize(rounds, lambda span: (span.name, span.scope))
    return profile, {
        **run_facts(),
        "pallas_kernels": str(params.kernels),
        "arguments": vars(args) | {"plot": args.plot and str(args.plot)},
        "config": config_facts(config),
        "mode": bench.mode.name,
        "profiled_rounds": len(rounds),
        "round_us": round_us,
        "unprofiled_round_us": unprofiled_us,
        "gaps_us": statistics.mean(round_.gaps_us for round_ in rounds),
        "longest_gap_us": statistics.mean(round_.longest_gap_us for round_ in rounds),
        "host_gap_us": profile.host_gap_us,
        "scopes": [as_row(s, costs[s], round_us, layer_runs) for s in in_order(costs)],
        "kernels": [
            {"kernel": name} | dataclasses.asdict(scope) | dataclasses.asdict(cost)
            for (name, scope), cost in kernels.items()
        ],
    }


def in_order(scopes: Iterable[Scope]) -> list[Scope]:
    parts = (*PARTS, OTHER)
    return sorted(scopes, key=lambda s: (LANES.index(s.phase), parts.index(s.part)))


def as_row(scope: Scope, cost: Cost, round_us: float, layer_runs: dict[str, int]) -> dict[str, Any]:
    """One row of the results. ``launches_per_layer`` is per run of a layer: drafting runs its
    layers several times in a round."""
    runs = layer_runs.get(scope.phase) if scope.part in LAYER_PARTS else None
    return {
        **dataclasses.asdict(scope),
        "us": cost.us,
        "share": cost.us / round_us,
        "launches": cost.launches,
        "launches_per_layer": cost.launches / runs if runs else None,
    }


def make_table(results: dict[str, Any]) -> Table:
    args, round_us = results["arguments"], results["round_us"]
    layers = f"{args['layers']} layers, " if args["layers"] else ""
    title = (
        f"{args['shape']}, {layers}{args['dtype']}, {results['mode']}, batch {args['batch']}, "
        f"context {args['context']}, {device_line(results)}"
    )
    caption = (
        f"{round_us:,.0f} us a round, {results['unprofiled_round_us']:,.0f} without the profiler; "
        f"{results['host_gap_us']:,.0f} us between the calls\n"
        f"kernels: {results['pallas_kernels']}\n{results['command']}"
    )
    figures = ("us/round", "%", "launches/round", "launches/layer")
    table = left_table(title, caption, left=("phase", "part"), right=figures)

    def add(phase: str, part: str, us: float, launches: float | None, per_layer: float | None):
        counts = or_blank(launches, ".0f"), or_blank(per_layer)
        table.add_row(phase, part, f"{us:,.1f}", f"{100 * us / round_us:.1f}", *counts)

    for phase, group in itertools.groupby(results["scopes"], lambda row: row["phase"]):
        rows = list(group)
        add(phase, "", sum(r["us"] for r in rows), sum(r["launches"] for r in rows), None)
        for row in rows if len(rows) > 1 else ():
            add("", row["part"], row["us"], row["launches"], row["launches_per_layer"])
    add("gaps", "", results["gaps_us"], None, None)
    add("", "the longest", results["longest_gap_us"], None, None)
    table.add_section()
    add("round", "", round_us, sum(row["launches"] for row in results["scopes"]), None)
    return table


def plot_round(round_: Round, title: str, path: Path) -> None:
    """A lane for each phase, colored by part, over the milliseconds of a round."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    axes = figure.subplots()
    tab20 = matplotlib.colormaps["tab20"]
    colors = {part: tab20(index) for index, part in enumerate(PARTS)} | {OTHER: (0.5, 0.5, 0.5, 1)}
    for lane, phase in enumerate(LANES):
        spans = [span for span in round_.spans if span.scope.phase == phase]
        axes.broken_barh(
            [(1e-3 * span.start_us, 1e-3 * span.duration_us) for span in spans],
            (lane - 0.4, 0.8),
            facecolors=[colors[span.scope.part] for span in spans],
        )
    axes.set(xlabel="ms", title=title, xlim=(0, 1e-3 * round_.length_us))
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    shown = {span.scope.part for span in round_.spans}
    handles = [Patch(color=color, label=part) for part, color in colors.items() if part in shown]
    figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> None:
    progress = progress_console()
    profile, results = measure(args, progress)
    show_results(results, make_table(results), as_json=args.json, width=TABLE_WIDTH)
    if args.plot:
        by_length = sorted(profile.rounds, key=lambda round_: round_.length_us)
        title = f"{args.shape}, {results['mode']}, batch {args.batch}, context {args.context}"
        plot_round(by_length[len(by_length) // 2], title, args.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
