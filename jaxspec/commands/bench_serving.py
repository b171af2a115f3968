"""Serve many requests as they arrive, and measure throughput and what each client waits for.

The requests run on the built-in model (or --model), with prompts from the source files of Python's
standard library; or, with --shape, on random weights of a public model's shape, with prompts of
random tokens and synthetic acceptance (see `jaxspec bench engine`). The workload runs twice: first
to compile, then to measure. Stop tokens end no request: each generates its number of tokens.

The device counts as idle from when a call's results are ready to when the launch of the next one
has returned.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jaxspec.benchmarking import workloads
from jaxspec.benchmarking.compiling import compile_side_by_side
from jaxspec.benchmarking.modes import Mode, make_params, parse_mode
from jaxspec.benchmarking.random_params import random_decoder, random_eagle3_head
from jaxspec.benchmarking.rounds import Bench, Workload, time_mode
from jaxspec.benchmarking.shapes import SHAPES
from jaxspec.benchmarking.workloads import Arrival, Lengths
from jaxspec.commands.run_facts import run_facts
from jaxspec.commands.serving_tables import make_tables, plot_times
from jaxspec.commands.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_results,
    table_console,
)
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.load_test import Client, LoadResult, LoadTest
from jaxspec.loading import load, resolve_dtype
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.tokenizer import TextTokenizer
from pallas_kernels.selection import Kernels

SYNTHETIC = "chain:5@3.5"
MOST_JOBS = 4  # batches compiled at a time; each needs memory for a state for a moment
COUNTS = "rows", "prompt_tokens", "new_tokens", "max_length", "repeats", "load_requests"


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench serving", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help="as in generate; not with --shape")
    add("--shape", choices=SHAPES, help="random weights of this shape instead of --model's, whose "
        "tokenizer then only counts the tokens of --lengths")  # fmt: skip
    add("--tree", help="draft tree: chain:K or NODES:DEPTH:TOPK, with --shape also @ACCEPTANCE; "
        f"(default: generate's, with --shape {SYNTHETIC})")  # fmt: skip
    add("--requests", default="100", help="numbers of requests, separated by commas; each is a "
        "run of its own")  # fmt: skip
    add("--rate", type=float, help="requests a second, as a Poisson process (default: all at once)")
    add("--load", type=shares, default=(), help="then also Poisson arrivals at these shares of the "
        "highest throughput, separated by commas")  # fmt: skip
    add("--load-requests", type=int, default=100, help="number of requests of --load")
    add("--repeats", type=int, default=1, help="measure each this often, and show the median")
    add("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    add("--new-tokens", type=int, default=64, help="tokens that a request generates")
    add("--spread", type=float, default=0.0, help="lengths are drawn evenly from those at most "
        "this share shorter or longer")  # fmt: skip
    add("--lengths", type=Path, metavar="FILE", help="prompts and numbers of new tokens from a "
        "JSON file like ShareGPT's; with --shape the lengths alone")  # fmt: skip
    add("--max-length", type=int, default=2048, help="most tokens of a request from --lengths")
    add("--shared-prefix", type=int, default=0, metavar="N", help="the same N tokens come before "
        "every prompt")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    add("--seed", type=int, default=0, help="seed of arrivals, lengths and prompts")
    add("--rows", type=int, default=16, help="requests that run together")
    add("--rounds-per-call", type=int, default=32, help="most rounds of a call")
    add("--prefill-budget", type=int, default=2048, help="most prompt tokens between two calls")
    add("--page-size", type=int, default=16, help="tokens of a page of the KV cache")
    add("--pages", type=int, help="pages of the KV cache (default: as the rows need, or as fit)")
    add("--no-prefix-cache", action="store_true", help="keep no pages for later requests")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on CPU, else bfloat16)")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--adaptive", action="store_true", help="choose the tree of each call, or none, by what a "
        "round costs and what is accepted; --tree is the largest")  # fmt: skip
    add("--compare", choices=("plain", "fixed"), help="run the same without speculation, or with "
        "--adaptive in the largest tree always, too")  # fmt: skip
    add("--bare", action="store_true", help="time the same without a scheduler, too, up to --rows; "
        "with --shape")  # fmt: skip
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    add("--png", type=Path, help="write the distribution of the times as a PNG")
    return parser


# The workload.


def shares(text: str) -> tuple[float, ...]:
    """Of an option: positive numbers, separated by commas."""
    found = tuple(float(part) for part in text.split(","))
    if not all(0 < share < float("inf") for share in found):
        raise argparse.ArgumentTypeError(f"must be positive numbers, got {text}")
    return found


def counts_of(args: argparse.Namespace) -> list[int]:
    """Numbers of requests."""
    try:
        counts = [int(part) for part in args.requests.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"--requests must be numbers, at least 1 each, got {args.requests}")
    return counts


def make_arrivals(args: argparse.Namespace, count: int, rate: float | None) -> list[Arrival]:
    """Raises ValueError for options that make no workload."""
    for name in COUNTS:
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least 1, got {getattr(args, name)}")
    if args.shared_prefix < 0:
        raise ValueError(f"--shared-prefix must be at least 0, got {args.shared_prefix}")
    if args.shape and args.drafter != "auto":
        raise ValueError("--drafter is for models: with --shape the drafter is an EAGLE-3 head")
    if args.bare and not args.shape:
        raise ValueError("--bare is for random weights: give --shape as well")
    if args.load and args.rate is not None:
        raise ValueError("--load gives the rates itself: leave out --rate")
    if args.compare == "fixed" and not args.adaptive:
        raise ValueError("--compare fixed is for --adaptive: without it the tree is fixed already")
    times = workloads.arrival_times(count, rate, args.seed)
    prompts, new_tokens = make_prompts(args, count)
    return [Arrival(*one) for one in zip(times, map(tuple, prompts), new_tokens, strict=True)]


def make_prompts(args: argparse.Namespace, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each is to get."""
    encode = None if args.shape and not args.lengths else TextTokenizer(args.model).encode
    prompts = None
    if args.lengths:
        assert encode is not None
        pairs = workloads.tokenized_conversations(
            args.lengths, encode, count, args.max_length, args.seed
        )
        prompts, lengths = [prompt for prompt, _ in pairs], [Lengths(len(p), n) for p, n in pairs]
    else:
        middle = Lengths(args.prompt_tokens, args.new_tokens)
        lengths = workloads.drawn_lengths(count, middle, args.spread, args.seed)
    wanted = [args.shared_prefix, *(own.prompt for own in lengths)]
    if args.shape:
        vocab_size = SHAPES[args.shape].vocab_size
        prefix, *prompts = workloads.random_prompts(wanted, vocab_size, args.seed)
    else:
        assert encode is not None
        prefix, *cut = workloads.source_prompts(wanted, encode, args.seed)
        prompts = prompts or cut
    return [prefix + prompt for prompt in prompts], [own.new for own in lengths]


# The engines.


def make_engine(args: argparse.Namespace, params: EngineParams, longest: int, name: str) -> Engine:
    """Raises ValueError for options that do not go together."""
    return Engine(
        params,
        CacheConfig(page_size=args.page_size, max_length=longest, num_pages=args.pages),
        EngineConfig(
            max_rows=args.rows,
            rounds_per_call=args.rounds_per_call,
            prefill_budget=args.prefill_budget,
            prefix_caching=not args.no_prefix_cache,
            adaptive=name == "adaptive",
        ),
    )


class Models:
    """The weights of all runs, on the device once."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self._random = self._random_weights() if args.shape else None

    def _random_weights(self) -> tuple[Decoder, DraftHead]:
        config, dtype = SHAPES[self.args.shape], resolve_dtype(self.args.dtype)
        target = random_decoder(config, dtype, None, seed=0)
        return target, random_eagle3_head(config, dtype, None, seed=1)

    def mode(self, name: str) -> Mode:
        """Of random weights: how a run decodes."""
        return parse_mode("plain" if name == "plain" else self.args.tree or SYNTHETIC)

    def params(self, name: str) -> EngineParams:
        args = self.args
        if self._random is not None:
            return make_params(self.mode(name), *self._random, None, Kernels.parse(args.kernels))
        if name == "plain":
            return load(args.model, "none", dtype=args.dtype, kernels=args.kernels)
        tree = None if args.tree is None else SpeculationConfig.parse(args.tree)
        return load(
            args.model, args.drafter, speculation=tree, dtype=args.dtype, kernels=args.kernels
        )


class Run(NamedTuple):
    """Results of one workload, and of the test that gave them.

    Attributes:
      mode: "speculative", "adaptive", "fixed" or "plain".
      rate: requests a second; None: all at once.
      bare: what the same rows give without a scheduler; see bare_rounds.
    """

    mode: str
    rate: float | None
    result: LoadResult
    clients: list[Client]
    bare: dict[str, float]

    @property
    def name(self) -> str:
        arrivals = "at once" if self.rate is None else f"at {self.rate:.3g} a second"
        return f"{self.mode}, {len(self.clients)} {arrivals}"


def measure(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[Run]]:
    """All results, and the runs."""
    workloads = [make_arrivals(args, count, args.rate) for count in counts_of(args)]
    console.print("loading")
    models, runs, kernels = Models(args), [], ""
    first = "plain" if args.tree == "plain" else "speculative"
    first = "adaptive" if args.adaptive else first
    for name in [first] if args.compare in (None, first) else [first, args.compare]:
        longest = max(len(one.prompt) + one.new_tokens for one in itertools.chain(*workloads))
        engine = make_engine(args, models.params(name), longest, name)
        kernels = str(engine.kernels)
        own = serve(args, engine, name, workloads, console)
        del engine  # its memory is for the next one
        if args.bare:
            bare = bare_rounds(args, models.params(name), models.mode(name), console)
            own = [run._replace(bare=bare.get(run.result.requests, {})) for run in own]
        runs += own
    results = {
        **run_facts(),
        "own_kernels": kernels,
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "runs": [as_record(run) for run in runs],
    }
    return results, runs


def as_record(run: Run) -> dict[str, Any]:
    own = {"mode": run.mode, "rate": run.rate, **dataclasses.asdict(run.result)}
    return own | ({"bare": run.bare} if run.bare else {})


def serve(
    args: argparse.Namespace,
    engine: Engine,
    name: str,
    workloads: Sequence[Sequence[Arrival]],
    console: Console,
) -> list[Run]:
    """Run all workloads on an engine, each first to compile."""
    runs = []
    for arrivals in workloads:
        test = LoadTest(engine, arrivals, args.temperature)
        console.print(f"{name}, {len(arrivals)} requests: compiling, with the whole workload")
        test.warm_up()
        console.print(f"{name}: {engine.programs.compiled} programs; measuring")
        runs.append(repeated(args, name, test, args.rate))
        console.print(summary(runs[-1]))
    fastest = max(run.result.requests / run.result.seconds for run in runs)
    for share in args.load:
        rate = share * fastest
        test = LoadTest(engine, make_arrivals(args, args.load_requests, rate), args.temperature)
        console.print(f"{name}: measuring at {rate:.2f} requests a second")
        runs.append(repeated(args, name, test, rate))
        console.print(summary(runs[-1]))
    return runs


def summary(run: Run) -> str:
    result = run.result
    return (
        f"{run.name}: {result.seconds:.3f} s, {result.total_per_second:,.0f} tokens/s in all, "
        f"{result.generated_per_second:,.0f} generated, device idle {result.device_idle:.1%}"
    )


def repeated(args: argparse.Namespace, name: str, test: LoadTest, rate: float | None) -> Run:
    """The run of median throughput."""
    runs = []
    for _ in range(args.repeats):
        result = test.run()
        runs.append(Run(name, rate, result, test.clients, {}))
    return sorted(runs, key=lambda run: run.result.total_per_second)[len(runs) // 2]


def bare_rounds(
    args: argparse.Namespace, params: EngineParams, mode: Mode, console: Console
) -> dict[int, dict[str, float]]:
    """What a batch of each size gives without a scheduler: all prompts are read, then all rounds
    run, as `jaxspec bench engine` times them."""

    def compiled(count: int) -> Bench:
        rounds = mode.rounds(args.new_tokens)
        context = args.shared_prefix + args.prompt_tokens
        workload = Workload(count, context, rounds, args.page_size, repeats=3)
        return Bench(mode, params, workload)

    counts = [count for count in counts_of(args) if count <= args.rows]
    benches = compile_side_by_side(compiled, counts, "bare batches", MOST_JOBS, console.print)
    found = {}
    for count, bench in zip(counts, list(benches), strict=True):
        timing = time_mode(bench, lambda _: None)
        rounds = (args.new_tokens - 1) / timing.acceptance_length
        seconds = 1e-3 * (timing.prefill_ms + rounds * timing.round_ms)
        found[count] = {
            "prefill_ms": timing.prefill_ms,
            "round_ms": timing.round_ms,
            "acceptance_length": timing.acceptance_length,
            "total_per_second": count * (bench.workload.context + args.new_tokens) / seconds,
        }
    return found


def run(args: argparse.Namespace) -> None:
    results, runs = measure(args, progress_console())
    *first, last = make_tables(results)
    for table in first:
        table_console(stderr=args.json).print(table)
    show_results(results, last, as_json=args.json)
    if args.png is not None:
        plot_times(results, [(run.name, run.clients) for run in runs], args.png)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments, expected=(ValueError, OSError, RuntimeError))
