"""Compare many requests together, by default, with plain decoding and with one at a time.

The requests are cut from Python's own source files: prompts and new tokens of many lengths, and
temperatures in turn. Three engines serve them: the default one, which chooses its draft trees; one
with its largest tree always; and one without a drafter. Their calls alternate, so that a machine
whose speed drifts is as fast for each. The first call of an engine compiles its programs, or reads
those that an earlier run stored. Later calls give a share of plain decoding's speed each; the table
has their median and range, by wall time and by the processor's time, which other processes disturb
less.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.engine_options import add_program_options, check_program_options
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.program_cache import keep_compiled_programs, program_folder
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_model_option,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.evaluation.benchmarks.workloads import Lengths, drawn_lengths, source_prompts
from jaxspec.evaluation.load_test import rounds_by_name
from jaxspec.llm.llm import LLM

PLAIN, FIXED, DEFAULT = "plain", "fixed", "default"


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench together", __doc__)
    add_model_option(parser)
    add = parser.add_argument
    add("--drafter", default="auto", help="of the default and of the fixed engine")
    add("--requests", type=number, default=60, help="requests of a call")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.5, 0.7, 1.0], help="in turn")
    add("--prompt-tokens", type=number, default=40, help="of a prompt, in the mean")
    add("--new-tokens", type=number, default=80, help="of a request, in the mean")
    add("--spread", type=float, default=0.6, help="both lengths differ by up to such a share")
    add("--calls", type=number, default=6, help="of each engine, the first one included")
    add("--alone", type=number, default=12, help="requests that run one at a time, in each call "
        "but the first")  # fmt: skip
    add("--max-rows", type=number, default=EngineConfig.max_rows, help="most requests together")
    add("--json", action="store_true", help=JSON_PARTS)
    add_program_options(parser)
    return parser


@dataclasses.dataclass(frozen=True)
class Timed:
    """Tokens a second of a call: by wall time, and by the processor's."""

    wall: float
    processor: float


class Bench:
    """The engines, and the requests of their calls."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.llms = {PLAIN: self._llm("none", None), DEFAULT: self._llm(args.drafter, None)}
        self.llms[FIXED] = self._llm(args.drafter, False)
        middle = Lengths(args.prompt_tokens, args.new_tokens)
        lengths = drawn_lengths(args.requests, middle, args.spread, seed=0)

        def encode(text: str) -> list[int]:
            return self.llms[PLAIN].tokenize([text])[0] if text else []

        self.prompts = source_prompts([each.prompt for each in lengths], encode, seed=0)
        self.sampling = [
            SamplingParams(
                temperature=args.temperatures[index % len(args.temperatures)],
                seed=index,
                max_tokens=each.new,
                stop_token_ids=(),
            )
            for index, each in enumerate(lengths)
        ]

    def _llm(self, drafter: str, adaptive: bool | None) -> LLM:
        config = EngineConfig(max_rows=self.args.max_rows, adaptive=adaptive)
        return LLM(self.args.model, drafter, engine=config)

    def call(self, name: str, turn: int, count: int, *, alone: bool) -> Timed:
        """The first ``count`` requests, together or one after the other."""
        sampling = [
            dataclasses.replace(each, cache_salt=f"{turn} {alone}")
            for each in self.sampling[:count]
        ]
        size = 1 if alone else count
        clocks = time.perf_counter(), time.process_time()
        tokens = 0
        for start in range(0, count, size):
            part = slice(start, start + size)
            done = self.llms[name].generate(self.prompts[:count][part], sampling[part])
            tokens += sum(len(each.token_ids) for each in done)
        wall, processor = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
        return Timed(tokens / wall, tokens / processor)


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """All calls of all engines in turn: then one part for each engine."""
    if args.calls < 3:
        raise ValueError("--calls must be at least 3: the first call compiles")
    check_program_options(args)
    keep_compiled_programs(program_folder(args))
    bench, count = Bench(args), args.requests
    few = min(args.alone, count)
    together: dict[str, list[Timed]] = {name: [] for name in bench.llms}
    alone: dict[str, list[Timed]] = {name: [] for name in bench.llms}
    for turn in range(args.calls):
        for name in bench.llms:
            together[name].append(bench.call(name, turn, count, alone=False))
            console.print(f"{name}, call {turn + 1}: {together[name][-1].wall:,.0f} tokens/s")
        for name in bench.llms if turn else ():
            alone[name].append(bench.call(name, turn, few, alone=True))
    folder = args.compilation_cache and str(args.compilation_cache)
    facts = {**run_facts(), "arguments": vars(args) | {"compilation_cache": folder}}
    for name, llm in bench.llms.items():
        rounds = rounds_by_name(llm.engine.shapes.rounds)
        yield facts | {"engines": [result(name, together, alone) | {"rounds": rounds}]}


def result(
    name: str, together: dict[str, list[Timed]], alone: dict[str, list[Timed]]
) -> dict[str, Any]:
    """An engine's figures. The second call may still compile beside its work: it is not counted."""
    timed, plain = together[name], together[PLAIN][2:]
    single, plain_single = alone[name][1:], alone[PLAIN][1:]
    return {
        "name": name,
        "calls": [each.wall for each in timed],
        "of_plain": ratios(timed[2:], plain, "wall"),
        "of_plain_processor": ratios(timed[2:], plain, "processor"),
        "of_alone": ratios(timed[2:], single, "wall"),
        "alone_of_plain": ratios(single, plain_single, "wall"),
    }


def ratios(timed: Sequence[Timed], other: Sequence[Timed], clock: str) -> list[float]:
    """An engine's tokens a second as a share of another's, in each turn."""
    return [getattr(a, clock) / getattr(b, clock) for a, b in zip(timed, other, strict=True)]


def make_tables(results: dict[str, Any]) -> list[Table]:
    columns = ("first call", "third", "together / plain", "by processor time", "together / alone",
               "alone / plain alone")  # fmt: skip
    table = left_table(device_line(results), results["command"], right=("engine", *columns))
    table.add_column("rounds")
    for row in results["engines"]:
        table.add_row(
            row["name"],
            *(f"{row['calls'][index]:,.0f} tokens/s" for index in (0, 2)),
            *(spread(row[key]) for key in ("of_plain", "of_plain_processor", "of_alone",
                                           "alone_of_plain")),
            ", ".join(f"{count:,} {name}" for name, count in row["rounds"].items()),
        )  # fmt: skip
    return [table]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def run(args: argparse.Namespace) -> None:
    show_parts(measure(args, progress_console()), "engines", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
