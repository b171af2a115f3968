"""Compare adaptive speculation with every fixed tree, at several loads and levels of acceptance.

One engine of a public model's shape, with random weights, serves all of them: its tree is fixed, or
chosen call by call. A number of clients sends requests, each the next as soon as its last one has
ended. A level is the chance to accept the next drafted token of a chain; every request has one
("synthetic" acceptance), and the text means nothing. The mixed load changes clients and levels from
phase to phase, and each phase has a fixed number of tokens.

Each tree does the same work at a load: the same requests, and as many tokens. The adaptive engine
starts with no knowledge of acceptance; the first tokens (--warm-up) are not counted. In the mixed
load everything is counted, admissions and what it takes to learn, too.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.commands.shared.option_types import number, numbers
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.engine import Engine
from jaxspec.evaluation.benchmarks.acceptance_levels import AcceptanceLevels
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_draft_head
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.evaluation.closed_loop import Clients, Phase, Requests
from jaxspec.evaluation.load_test import rounds_by_name
from pallas_kernels.selection import Kernels

ADAPTIVE = "adaptive"
ENOUGH_TOKENS = 16  # of each client: by then all their prompts have been read
# Load that changes, as shares of --clients and of --levels: a quiet night, a crowd, and between.
MIXED = ((0.0, 1.0), (1.0, 0.0), (0.3, 0.6), (0.6, 1.0), (1.0, 0.6), (0.3, 0.0), (0.0, 0.6))


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench adaptive", __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-3.1-8b", help="shape of the model")
    add("--trees", default="plain,chain:1,chain:3,chain:5", help="trees to choose from, and to "
        "compare with: plain, chain:K or NODES:DEPTH:TOPK, the largest last")  # fmt: skip
    add("--clients", type=numbers, default=(1, 8, 32, 128), help="numbers of clients")
    add("--levels", default="0.2,0.5,0.85", help="chances to accept the next token of a chain")
    add("--prompt-tokens", type=number, default=512, help="tokens of a prompt")
    add("--new-tokens", type=int, default=512, help="most tokens that a request generates; each "
        "has between half of them and all")  # fmt: skip
    add("--seconds", type=float, default=2.0, help="work at a load: so many seconds of plain "
        "decoding; 0: the mixed load only")  # fmt: skip
    add("--warm-up", type=float, default=1.0, help="such seconds before that, not counted")
    add("--phase-seconds", type=float, default=1.0, help="such seconds of a phase of the mixed "
        "load; 0: no mixed load")  # fmt: skip
    add("--rounds-per-call", type=number, default=16, help="most rounds of a call")
    add("--page-size", type=number, default=64, help="tokens of a page of the KV cache")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on CPU, else bfloat16)")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the options say. Raises ValueError for what cannot be measured."""

    trees: tuple[TreeShape, ...]
    clients: tuple[int, ...]
    levels: tuple[float, ...]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Choices":
        if args.new_tokens < 2:
            raise ValueError("--new-tokens must be at least 2")
        if min(args.seconds, args.warm_up, args.phase_seconds) < 0:
            raise ValueError("--seconds, --warm-up and --phase-seconds must be at least 0")
        if not (args.seconds or args.phase_seconds):
            raise ValueError("there is nothing to run: raise --seconds or --phase-seconds")
        trees = tuple(TreeShape.parse(text) for text in args.trees.split(","))
        if not trees[0].is_plain or trees[-1].is_plain:
            raise ValueError("--trees must begin with plain and end with the largest tree")
        levels = tuple(sorted(float(text) for text in args.levels.split(",")))
        return cls(trees, tuple(sorted(set(args.clients))), levels)


def make_engine(args: argparse.Namespace, choices: Choices) -> Engine:
    config, dtype = SHAPES[args.shape], resolve_dtype(args.dtype)
    largest = choices.trees[-1]
    speculation = SpeculationConfig(
        largest.num_nodes,
        largest.max_depth,
        largest.top_k,
        acceptance=AcceptanceLevels(choices.levels),
    )
    params = EngineParams(
        target=random_decoder(config, dtype, None, seed=0),
        drafter=EagleDrafter(head=random_draft_head(config, dtype, None, seed=1)),
        speculation=speculation,
        kernels=Kernels.parse(args.kernels),
    )
    return Engine(
        params,
        CacheConfig(page_size=args.page_size, max_length=args.prompt_tokens + args.new_tokens),
        EngineConfig(
            max_rows=choices.clients[-1],
            rounds_per_call=args.rounds_per_call,
            adaptive=True,
            shapes=choices.trees[1:],
        ),
    )


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One load after the other, and then the mixed one."""
    choices = Choices.of(args)
    console.print(f"making random weights of {args.shape}")
    engine = make_engine(args, choices)
    seconds = engine.warm_up(
        [SamplingParams()],
        rows=choices.clients,
        on_progress=lambda done, of: console.print(f"compiled {done} of {of} programs"),
    )
    console.print(f"compiled, and measured the costs of rounds, in {seconds:.0f} s")
    vocab = engine.params.target.config.vocab_size
    requests = Requests(vocab, args.prompt_tokens, args.new_tokens, len(choices.levels))
    bench = Bench(args, choices, Clients(engine, requests), console)
    facts = {
        **run_facts(),
        "pallas_kernels": str(engine.params.kernels),
        "arguments": vars(args),
        "warm_up_seconds": seconds,
        "round_ms": bench.round_ms(),
        "call_ms": 1e3 * engine.shapes.call_seconds,
        "mixed": None,
    }
    for row in bench.steady() if args.seconds else ():
        yield facts | {"steady": [row], "compiled": engine.programs.compiled}
    if args.phase_seconds:
        parts = {"steady": [], "mixed": bench.mixed(), "compiled": engine.programs.compiled}
        yield facts | parts


class Bench:
    """Runs the loads with each fixed tree, and with those that the engine chooses."""

    def __init__(
        self, args: argparse.Namespace, choices: Choices, clients: Clients, console: Console
    ):
        self.args, self.choices, self.clients, self.console = args, choices, clients, console
        self.trees: dict[str, TreeShape | None] = {tree.name: tree for tree in choices.trees}
        self.trees[ADAPTIVE] = None

    def round_ms(self) -> dict[str, dict[str, float]]:
        """Costs of rounds that the warm-up measured, by tree and number of clients."""
        shapes = self.clients.engine.shapes
        return {
            tree.name: {
                str(count): 1e3 * shapes.seconds(count, tree) for count in self.choices.clients
            }
            for tree in self.choices.trees
        }

    def _use(self, name: str) -> None:
        self.clients.engine.shape = self.trees[name]
        self.clients.engine.shapes.restart()

    def steady(self) -> Iterator[dict[str, Any]]:
        """One load after the other: tokens a second by tree."""
        for count in self.choices.clients:
            for index, level in enumerate(self.choices.levels):
                rates, rounds, phase = {}, {}, Phase(count, index)
                work, warm_up_tokens = (
                    self._tokens(count, seconds)
                    for seconds in (self.args.seconds, self.args.warm_up)
                )
                for name in self.trees:
                    self._use(name)
                    outcome = self.clients.run(phase, work, warm_up_tokens=warm_up_tokens)
                    rates[name], rounds = outcome.rate, rounds_by_name(outcome.rounds)
                best = best_fixed(rates)
                row = {
                    "clients": count,
                    "level": level,
                    "rates": rates,
                    "best": best,
                    "of_best": rates[ADAPTIVE] / rates[best],
                    "of_plain": rates[ADAPTIVE] / rates["plain"],
                    "rounds": rounds,
                }
                self.console.print(
                    f"{count} clients, level {level:g}: adaptive {row['of_best']:.3f} of {best}"
                )
                yield row

    def _tokens(self, clients: int, seconds: float) -> int:
        """What plain decoding does in so many seconds."""
        return round(clients * seconds / self.clients.engine.shapes.seconds(clients, PLAIN))

    def mixed(self) -> dict[str, Any]:
        """Phases of as many tokens for each tree, one after the other without a pause."""
        phases = [
            Phase(_at(self.choices.clients, load), _index(self.choices.levels, level))
            for load, level in MIXED
        ]
        tokens = [self._tokens(phase.clients, self.args.phase_seconds) for phase in phases]
        # All prompts are read before: else the first tree alone would have to.
        largest = max(phases, key=lambda phase: phase.clients)
        self.clients.run(largest, ENOUGH_TOKENS * largest.clients)
        rates: dict[str, list[float]] = {}
        total: dict[str, float] = {}
        for name in self.trees:
            self._use(name)
            outcomes = [
                self.clients.run(phase, count) for phase, count in zip(phases, tokens, strict=True)
            ]
            rates[name] = [outcome.rate for outcome in outcomes]
            seconds = sum(outcome.seconds for outcome in outcomes)
            total[name] = sum(outcome.tokens for outcome in outcomes) / seconds
            self.console.print(f"mixed load, {name}: {total[name]:,.0f} tokens/s")
        best, levels = best_fixed(total), self.choices.levels
        return {
            "phases": [
                {"clients": phase.clients, "level": levels[phase.level], "tokens": count}
                for phase, count in zip(phases, tokens, strict=True)
            ],
            "rates": rates,
            "total": total,
            "best": best,
            "of_best": total[ADAPTIVE] / total[best],
        }


def best_fixed(rates: Mapping[str, float]) -> str:
    """The tree with the highest rate, of those that the engine did not choose."""
    return max((name for name in rates if name != ADAPTIVE), key=rates.__getitem__)


def _index(values: Sequence[Any], share: float) -> int:
    return round(share * (len(values) - 1))


def _at[T](values: Sequence[T], share: float) -> T:
    return values[_index(values, share)]


def make_tables(results: dict[str, Any]) -> list[Table]:
    arguments = results["arguments"]
    title = f"{arguments['shape']}, {device_line(results)}"
    trees = [*results["round_ms"], ADAPTIVE]
    figures = ("clients", "level", *trees, "best fixed", "of best", "of plain")
    table = left_table(f"{title}: tokens/s", right=figures)
    table.add_column("rounds of adaptive")
    for row in results["steady"]:
        table.add_row(
            str(row["clients"]),
            f"{row['level']:g}",
            *(f"{row['rates'][name]:,.0f}" for name in trees),
            row["best"],
            f"{row['of_best']:.3f}",
            f"{row['of_plain']:.3f}",
            ", ".join(f"{count:,} {name}" for name, count in row["rounds"].items()),
        )
    tables = [table, make_cost_table(results)]
    return tables if results["mixed"] is None else [*tables, make_mixed_table(results, trees)]


def make_cost_table(results: dict[str, Any]) -> Table:
    costs = results["round_ms"]
    table = left_table(
        "ms/round, as warm-up measured",
        f"kernels: {results['pallas_kernels']}\n{results['command']}",
        right=("tree", *next(iter(costs.values()))),
    )
    for name, by_clients in costs.items():
        table.add_row(name, *(f"{value:.2f}" for value in by_clients.values()))
    return table


def make_mixed_table(results: dict[str, Any], trees: Sequence[str]) -> Table:
    mixed = results["mixed"]
    title = f"mixed load, tokens/s; adaptive is {mixed['of_best']:.3f} of {mixed['best']}"
    table = left_table(title, right=("clients", "level", "tokens", *trees))
    for index, phase in enumerate(mixed["phases"]):
        rates = (f"{mixed['rates'][name][index]:,.0f}" for name in trees)
        table.add_row(str(phase["clients"]), f"{phase['level']:g}", f"{phase['tokens']:,}", *rates)
    table.add_section()
    table.add_row("all", "", "", *(f"{mixed['total'][name]:,.0f}" for name in trees))
    return table


def run(args: argparse.Namespace) -> None:
    show_parts(measure(args, progress_console()), "steady", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
