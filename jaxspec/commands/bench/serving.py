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
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from rich.console import Console

from jaxspec.checkpoints.load import load, resolve_dtype, with_kv_dtype
from jaxspec.commands.bench.serving_tables import make_tables
from jaxspec.commands.bench.serving_workloads import (
    check_options,
    comparisons,
    make_arrivals,
    make_matchers,
)
from jaxspec.commands.shared.engine_options import (
    AUTO_DRAFTER_HELP,
    add_drafter_bits,
    add_kv_dtype,
    add_quantization_options,
    add_sequence_parallel_option,
    add_tensor_parallel_option,
)
from jaxspec.commands.shared.option_types import (
    number,
    numbers,
    positive,
    positives,
    whole_numbers,
)
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.engine import Engine
from jaxspec.evaluation.benchmarks.compiling import compile_side_by_side
from jaxspec.evaluation.benchmarks.modes import EIGHT_BITS, Mode, make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.rounds import Bench, Workload, time_mode
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.evaluation.load_test import LoadResult, LoadTest
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.parallel import devices_of_model, replica_meshes
from pallas_kernels.selection import Kernels

SYNTHETIC = "chain:5@3.5"
MOST_JOBS = 4  # batches compiled at a time; each needs memory for a state for a moment


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench serving", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help=f"not with --shape: {AUTO_DRAFTER_HELP}")
    add("--shape", choices=SHAPES, help="random weights of this shape instead of --model's, whose "
        "tokenizer then only counts the tokens of --lengths")  # fmt: skip
    add("--tree", help="draft tree: chain:K or NODES:DEPTH:TOPK, with --shape also @ACCEPTANCE; "
        f"(default: generate's, with --shape {SYNTHETIC})")  # fmt: skip
    add("--requests", type=numbers, default=(100,), help="numbers of requests, separated by "
        "commas; each is a run of its own")  # fmt: skip
    add("--rate", type=positive, help="requests a second, as a Poisson process (default: all at "
        "once)")  # fmt: skip
    add("--load", type=positives, default=(), help="then also Poisson arrivals at these shares of "
        "the highest throughput, separated by commas")  # fmt: skip
    add("--load-requests", type=number, default=100, help="number of requests of --load")
    add("--repeats", type=number, default=1, help="measure each this often, and show the median")
    add("--prompt-tokens", type=number, default=64, help="tokens of a prompt")
    add("--new-tokens", type=number, default=64, help="tokens that a request generates")
    add("--spread", type=float, default=0.0, help="lengths are drawn evenly from those at most "
        "this share shorter or longer")  # fmt: skip
    add("--lengths", type=Path, metavar="FILE", help="prompts and numbers of new tokens from a "
        "JSON file like ShareGPT's; with --shape the lengths alone")  # fmt: skip
    add("--max-length", type=number, default=2048, help="most tokens of a request from --lengths")
    add("--shared-prefix", type=int, default=0, metavar="N", help="the same N tokens come before "
        "every prompt")  # fmt: skip
    add("--structured", type=whole_numbers, default=(0,), help="requests with a structured output "
        "(a JSON string without an end); numbers separated by commas are runs of "
        "their own")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    add("--seed", type=int, default=0, help="seed of arrivals, lengths and prompts")
    add("--rows", type=number, default=16, help="requests that run together")
    add("--rounds-per-call", type=number, default=32, help="most rounds of a call")
    add("--prefill-budget", type=number, default=2048, help="most prompt tokens between two calls")
    add("--page-size", type=number, default=16, help="tokens of a page of the KV cache")
    add("--pages", type=number, help="pages of the KV cache (default: as the rows need, or as fit)")
    add("--no-prefix-cache", action="store_true", help="keep no pages for later requests")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on CPU, else bfloat16)")
    add_kv_dtype(parser)
    add_tensor_parallel_option(parser)
    add_sequence_parallel_option(parser)
    add("--dp", type=int, default=1, metavar="N", help="engines side by side, each with the model "
        "on --tp x --sp devices of its own, and --rows requests together; a request goes to the "
        "one that serve --dp would give it to (data parallel)")  # fmt: skip
    add_quantization_options(parser)
    add_drafter_bits(parser)
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--adaptive", action="store_true", help="choose the tree of each call, or none, by what a "
        "round costs and what is accepted; --tree is the largest")  # fmt: skip
    add("--compare", type=comparisons, default=(), help="run the same, too, without speculation "
        "(plain), with --adaptive in the largest tree always (fixed), or each without the prefix "
        "cache (uncached); separated by commas")  # fmt: skip
    add("--bare", action="store_true", help="time the same without a scheduler, too, up to --rows; "
        "with --shape")  # fmt: skip
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


# The engines.


def make_engine(
    args: argparse.Namespace, params: EngineParams, longest: int, name: str, cached: bool
) -> Engine:
    """Raises ValueError for options that do not go together."""
    config = params.target.config
    matchers = None
    if any(args.structured):
        matchers = make_matchers(args, config.vocab_size, config.stop_token_ids)
    return Engine(
        params,
        CacheConfig(page_size=args.page_size, max_length=longest, num_pages=args.pages),
        EngineConfig(
            max_rows=args.rows,
            rounds_per_call=args.rounds_per_call,
            prefill_budget=args.prefill_budget,
            prefix_caching=cached,
            adaptive=name == "adaptive",
        ),
        make_matcher=matchers,
    )


class Models:
    """The weights of all runs, on the device once."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.meshes = replica_meshes(args.dp, args.tp, args.sp)
        self._random = [self._random_weights(mesh) for mesh in self.meshes] if args.shape else []

    def _random_weights(self, mesh: Mesh | None) -> tuple[Decoder, DraftHead | BlockHead]:
        config, dtype = SHAPES[self.args.shape], resolve_dtype(self.args.dtype)
        draft_scheme = self.args.drafter_quantization
        layers, lm_head = self.args.quantization, self.args.lm_head_quantization
        target = random_decoder(config, dtype, mesh, 0, layers, lm_head)
        return target, random_head(config, dtype, mesh, seed=1, quantization=draft_scheme)

    def mode(self, name: str) -> Mode:
        """How a run with random weights decodes."""
        if name == "plain":
            return parse_mode(name)
        bits = EIGHT_BITS if self.args.drafter_bits else ""
        return parse_mode((self.args.tree or SYNTHETIC) + bits)

    def params(self, name: str) -> list[EngineParams]:
        """The parameters of each engine of --dp."""
        return [self._params(name, replica) for replica in range(len(self.meshes))]

    def _params(self, name: str, replica: int) -> EngineParams:
        args, mesh = self.args, self.meshes[replica]
        if self._random:
            kernels = Kernels.parse(args.kernels, sharing=devices_of_model(mesh))
            params = make_params(self.mode(name), *self._random[replica], mesh, kernels)
            return with_kv_dtype(params, args.kv_dtype)
        load_drafter = functools.partial(
            load, args.model, dtype=args.dtype, kv_dtype=args.kv_dtype, mesh=mesh
        )
        if name == "plain":
            return load_drafter("none", kernels=args.kernels)
        tree = None if args.tree is None else SpeculationConfig.parse(args.tree)
        return load_drafter(
            args.drafter,
            speculation=tree,
            drafter_bits=args.drafter_bits,
            kernels=args.kernels,
        )


class Run(NamedTuple):
    """Results of one workload, and of the test that gave them.

    Attributes:
      mode: "speculative", "adaptive", "fixed" or "plain".
      rate: requests a second; None: all at once.
      prefix_cache: whether pages were kept for later requests.
      bare: what the same rows give without a scheduler; see bare_rounds.
      beside: against the same without a structured request, or with the prefix cache.
    """

    mode: str
    rate: float | None
    prefix_cache: bool
    result: LoadResult
    bare: dict[str, float]
    beside: dict[str, Any]

    @property
    def name(self) -> str:
        arrivals = "at once" if self.rate is None else f"at {self.rate:.3g} a second"
        structured = f", {self.result.structured} structured" if self.result.structured else ""
        cached = "" if self.prefix_cache else ", uncached"
        return f"{self.mode}, {self.requests} {arrivals}{structured}{cached}"

    @property
    def requests(self) -> int:
        return self.result.requests + self.result.failed

    @property
    def kind(self) -> tuple[str, int, float | None]:
        """Runs of one kind can be compared."""
        return self.mode, self.requests, self.rate

    def as_record(self) -> dict[str, Any]:
        settings = {"mode": self.mode, "rate": self.rate, "prefix_cache": self.prefix_cache}
        more = {"bare": self.bare, "beside": self.beside}
        given = {name: value for name, value in more.items() if value}
        return settings | dataclasses.asdict(self.result) | given


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One run after the other, each with everything needed to read it later."""
    check_options(args)
    workloads = [make_arrivals(args, count, args.rate) for count in args.requests]
    longest = max(
        len(arrival.prompt) + arrival.new_tokens for arrival in itertools.chain(*workloads)
    )
    console.print("loading")
    models, runs = Models(args), list[Run]()
    first = "plain" if args.tree == "plain" else "speculative"
    first = "adaptive" if args.adaptive else first
    caches = [not args.no_prefix_cache, *([False] if "uncached" in args.compare else [])]
    for name in dict.fromkeys([first, *(mode for mode in args.compare if mode != "uncached")]):
        params = models.params(name)
        bare = bare_rounds(args, params[0], models.mode(name), console) if args.bare else {}
        for cached in caches:
            engines = [make_engine(args, replica, longest, name, cached) for replica in params]
            facts = {
                **run_facts(),
                "pallas_kernels": str(params[0].kernels),
                "arguments": vars(args) | {"lengths": args.lengths and str(args.lengths)},
            }
            for run in serve(args, engines, name, console):
                if run.rate is None and cached and not run.result.structured:
                    run = run._replace(bare=bare.get(run.result.requests, {}))
                run = run._replace(beside=beside(run, runs))
                console.print(summary(run))
                runs.append(run)
                yield facts | {"runs": [run.as_record()]}
            del engines  # its memory is for the next one


def serve(
    args: argparse.Namespace, engines: Sequence[Engine], name: str, console: Console
) -> Iterator[Run]:
    """Run all workloads on the engines, each first to compile."""
    fastest = 0.0
    for count, structured in itertools.product(args.requests, args.structured):
        arrivals = make_arrivals(args, count, args.rate, structured)
        test = LoadTest(engines, arrivals, args.temperature)
        console.print(f"{name}, {count} requests: compiling, with the whole workload")
        test.warm_up()
        compiled = sum(engine.programs.compiled for engine in engines)
        console.print(f"{name}: {compiled} programs; measuring")
        run = repeated(args, name, test, args.rate)
        if not structured:
            fastest = max(fastest, run.result.requests / run.result.seconds)
        yield run
    for share in args.load:
        rate = share * fastest
        arrivals = make_arrivals(args, args.load_requests, rate)
        test = LoadTest(engines, arrivals, args.temperature)
        console.print(f"{name}: measuring at {rate:.2f} requests a second")
        yield repeated(args, name, test, rate)


def beside(run: Run, earlier: Sequence[Run]) -> dict[str, Any]:
    """A run against one of the same workload without a structured request, or if it has none, with
    the prefix cache: how many times as long, or as fast, it was. Nothing if there is no such run.
    """
    structured, cached = run.result.structured, run.prefix_cache
    wanted = (0, cached) if structured else (0, True)
    for other in earlier:
        if other.kind == run.kind and (other.result.structured, other.prefix_cache) == wanted:
            result, base = run.result, other.result
            return {
                "run": other.name,
                "first_token": ratios(result.first_token, base.first_token),
                "unstructured_between_tokens": ratios(
                    result.unstructured_between_tokens, base.unstructured_between_tokens
                ),
                "unstructured_per_second": result.unstructured_per_second
                / base.unstructured_per_second,
            }
    return {}


def ratios(figures: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float | None]:
    """None where there is nothing to compare with."""
    return {name: value / base[name] if base[name] else None for name, value in figures.items()}


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
        cached = test.engines[0].config.prefix_caching
        runs.append(Run(name, rate, cached, result, {}, {}))
    return sorted(runs, key=lambda run: run.result.total_per_second)[len(runs) // 2]


def bare_rounds(
    args: argparse.Namespace, params: EngineParams, mode: Mode, console: Console
) -> dict[int, dict[str, float]]:
    """What a batch of each size gives without a scheduler: all prompts are read, then all rounds
    run, as `jaxspec bench engine` times them."""
    one_state = threading.Lock()

    def compiled(size: int) -> Bench:
        rounds = mode.rounds(args.new_tokens)
        context = args.shared_prefix + args.prompt_tokens
        workload = Workload(size, context, rounds, args.page_size, repeats=3)
        return Bench(mode, params, workload, one_state).compile_all()

    sizes = [count for count in args.requests if count <= args.rows]
    benches = compile_side_by_side(
        compiled, sizes, lambda size: f"a bare batch of {size}", MOST_JOBS, console.print
    )
    found = {}
    for size, bench in zip(sizes, benches, strict=True):
        timing = time_mode(bench, lambda _: None)
        rounds = (args.new_tokens - 1) / timing.acceptance_length
        seconds = 1e-3 * (timing.prefill_ms + rounds * timing.round_ms)
        found[size] = {
            "prefill_ms": timing.prefill_ms,
            "round_ms": timing.round_ms,
            "acceptance_length": timing.acceptance_length,
            "total_per_second": size * (bench.workload.context + args.new_tokens) / seconds,
        }
    return found


def run(args: argparse.Namespace) -> None:
    show_parts(measure(args, progress_console()), "runs", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments, expected=(ValueError, OSError, RuntimeError))
