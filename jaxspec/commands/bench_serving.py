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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jaxspec.benchmarking import workloads
from jaxspec.benchmarking.modes import make_params, parse_mode
from jaxspec.benchmarking.random_params import random_decoder, random_eagle3_head
from jaxspec.benchmarking.shapes import SHAPES
from jaxspec.benchmarking.workloads import Arrival, Lengths
from jaxspec.commands.run_facts import run_facts
from jaxspec.commands.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.load_test import Client, LoadTest
from jaxspec.loading import load, resolve_dtype
from jaxspec.tokenizer import TextTokenizer
from pallas_kernels.selection import Kernels

SYNTHETIC = "chain:5@3.5"
COUNTS = ("requests", "rows", "prompt_tokens", "new_tokens", "max_length")


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench serving", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help="as in generate; not with --shape")
    add("--shape", choices=SHAPES, help="random weights of this shape instead of --model's, whose "
        "tokenizer then only counts the tokens of --lengths")  # fmt: skip
    add("--tree", help="draft tree: chain:K or NODES:DEPTH:TOPK, with --shape also @ACCEPTANCE; "
        f"(default: generate's, with --shape {SYNTHETIC})")  # fmt: skip
    add("--requests", type=int, default=100, help="number of requests")
    add("--rate", type=float, help="requests a second, as a Poisson process (default: all at once)")
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
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    add("--png", type=Path, help="write the distribution of the times as a PNG")
    return parser


# The workload.


def make_arrivals(args: argparse.Namespace) -> list[Arrival]:
    """Raises ValueError for options that make no workload."""
    for name in COUNTS:
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least 1, got {getattr(args, name)}")
    if args.shared_prefix < 0:
        raise ValueError(f"--shared-prefix must be at least 0, got {args.shared_prefix}")
    if args.shape and args.drafter != "auto":
        raise ValueError("--drafter is for models: with --shape the drafter is an EAGLE-3 head")
    if args.compare == "fixed" and not args.adaptive:
        raise ValueError("--compare fixed is for --adaptive: without it the tree is fixed already")
    times = workloads.arrival_times(args.requests, args.rate, args.seed)
    prompts, new_tokens = make_prompts(args)
    return [Arrival(*one) for one in zip(times, map(tuple, prompts), new_tokens, strict=True)]


def make_prompts(args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each is to get."""
    encode = None if args.shape and not args.lengths else TextTokenizer(args.model).encode
    prompts = None
    if args.lengths:
        assert encode is not None
        pairs = workloads.tokenized_conversations(
            args.lengths, encode, args.requests, args.max_length, args.seed
        )
        prompts, lengths = [prompt for prompt, _ in pairs], [Lengths(len(p), n) for p, n in pairs]
    else:
        middle = Lengths(args.prompt_tokens, args.new_tokens)
        lengths = workloads.drawn_lengths(args.requests, middle, args.spread, args.seed)
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


def make_engine(args: argparse.Namespace, arrivals: Sequence[Arrival], name: str) -> Engine:
    """Raises ValueError for options that do not go together."""
    plain = name == "plain"
    longest = max(len(arrival.prompt) + arrival.new_tokens for arrival in arrivals)
    return Engine(
        random_params(args, plain) if args.shape else loaded_params(args, plain),
        CacheConfig(page_size=args.page_size, max_length=longest, num_pages=args.pages),
        EngineConfig(
            max_rows=args.rows,
            rounds_per_call=args.rounds_per_call,
            prefill_budget=args.prefill_budget,
            prefix_caching=not args.no_prefix_cache,
            adaptive=name == "adaptive",
        ),
    )


def random_params(args: argparse.Namespace, plain: bool) -> EngineParams:
    config, dtype = SHAPES[args.shape], resolve_dtype(args.dtype)
    mode = parse_mode("plain" if plain else args.tree or SYNTHETIC)
    target, head = random_decoder(config, dtype, None, seed=0), None
    if mode.speculation:
        head = random_eagle3_head(config, dtype, None, seed=1)
    return make_params(mode, target, head, None, Kernels.parse(args.kernels))


def loaded_params(args: argparse.Namespace, plain: bool) -> EngineParams:
    tree = None if plain or args.tree is None else SpeculationConfig.parse(args.tree)
    drafter = "none" if plain else args.drafter
    return load(args.model, drafter, speculation=tree, dtype=args.dtype, kernels=args.kernels)


def measure(
    args: argparse.Namespace, console: Console
) -> tuple[dict[str, Any], dict[str, list[Client]]]:
    """All results, and the clients of each run."""
    arrivals = make_arrivals(args)
    runs, clients, kernels = {}, {}, ""
    names = ["adaptive" if args.adaptive else "speculative"]
    for name in [*names, *([args.compare] if args.compare else [])]:
        console.print(f"{name}: loading")
        engine = make_engine(args, arrivals, name)
        kernels, test = str(engine.kernels), LoadTest(engine, arrivals, args.temperature)
        console.print(f"{name}: compiling, with the whole workload")
        test.warm_up()
        console.print(f"{name}: {engine.programs.compiled} programs; measuring")
        runs[name] = dataclasses.asdict(test.run())
        clients[name] = test.clients
        del engine, test  # its memory is for the next one
    results = {
        **run_facts(),
        "own_kernels": kernels,
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "runs": runs,
    }
    return results, clients


# What is shown.


def as_ms(times: dict[str, float]) -> str:
    return " / ".join(f"{1e3 * value:,.1f}" for value in times.values())


def as_lines(run: dict[str, Any]) -> dict[str, str]:
    """The figures of a run as the table shows them."""
    depths = " ".join(f"{share:.2f}" for share in run["accepted_by_depth"])
    preempted = ", ".join(f"{count} by {how}" for how, count in run["preemptions"].items())
    rounds = ", ".join(f"{count:,} {name}" for name, count in run["rounds_by_shape"].items())
    return {
        "requests, failed": f"{run['requests']}, {run['failed']}",
        "seconds": f"{run['seconds']:.2f}",
        "generated tokens/s": f"{run['generated_per_second']:,.0f}",
        "total tokens/s": f"{run['total_per_second']:,.0f}",
        "first token, ms (p50 / p90 / p99)": as_ms(run["first_token"]),
        "between tokens, ms": as_ms(run["between_tokens"]),
        "between deliveries, ms": as_ms(run["between_deliveries"]),
        "longest gap, ms": f"{1e3 * run['longest_gap']:,.1f}",
        "device idle": f"{run['device_idle']:.1%}",
        "without requests": f"{run['without_requests']:.1%}",
        "KV waste": f"{run['kv_waste']:.1%}",
        "most KV pages held": f"{run['kv_used']:.1%}",
        "prefix hits": f"{run['prompt_hits']:.1%} of the prompts' tokens",
        "tokens a round": f"{run['tokens_per_round']:.2f}",
        "accepted by depth": depths or "-",
        "rounds": rounds,
        "preemptions": preempted,
        "compiled after warm-up": str(run["compiled"]),
    }


def title(results: dict[str, Any]) -> str:
    arguments = results["arguments"]
    model = arguments["shape"] or Path(arguments["model"]).name
    rate = arguments["rate"]
    arrivals = "at once" if rate is None else f"at {rate:g} a second"
    return (
        f"{model}, {arguments['requests']} requests {arrivals}, {arguments['rows']} rows, "
        f"{results['device']}, jax {results['jax']}, {results['date']}"
    )


def make_table(results: dict[str, Any]) -> Table:
    caption = f"kernels: {results['own_kernels']}\n{results['command']}"
    table = Table(
        title=title(results), caption=caption, title_justify="left", caption_justify="left"
    )
    table.add_column("")
    for name in results["runs"]:
        table.add_column(name, justify="right")
    columns = [as_lines(run) for run in results["runs"].values()]
    for line in columns[0]:
        table.add_row(line, *(column[line] for column in columns))
    return table


def plot_times(results: dict[str, Any], runs: dict[str, list[Client]], path: Path) -> None:
    """For each run, the share of the requests that waited at most so long."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    first, between = figure.subplots(1, 2)
    for name, clients in runs.items():
        own = [client for client in clients if client.times]
        first.ecdf([client.first_token for client in own], label=name)
        between.ecdf([1e3 * client.between_tokens for client in own])
    first.set(xlabel="time to first token, s", ylabel="share of requests", xlim=(0, None))
    between.set(xlabel="mean time between tokens, ms", xlim=(0, None))
    first.legend()
    figure.suptitle(title(results), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> None:
    results, clients = measure(args, progress_console())
    show_results(results, make_table(results), as_json=args.json)
    if args.png is not None:
        plot_times(results, clients, args.png)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments, expected=(ValueError, OSError, RuntimeError))
