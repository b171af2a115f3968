"""Generate the same texts alone and in full batches in deterministic mode, and compare the tokens.

Every request runs alone first, decoded plainly. Then all of them run together, in another order for
each drafter and tree; where the table says "few", with so few pages that requests are swapped. The
prompts are cut from the source files of Python's standard library, and half of them begin like
others, so that the prefix cache has them. Every second request samples. The same load runs in
ordinary mode, too, to show the price; its texts are compared with those of plain decoding there.

The exit status is 2 if a text differs in deterministic mode.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from jaxspec.benchmarking.workloads import Lengths, drawn_lengths, source_prompts
from jaxspec.built_in import BUILT_IN_HEAD
from jaxspec.cache import pages_for
from jaxspec.commands.run_facts import run_facts
from jaxspec.commands.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.comparison import first_difference
from jaxspec.config.cache import CacheConfig
from jaxspec.config.checks import check_count
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.loading import load
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.tokenizer import TextTokenizer

PAGE_SIZE = 16
PREFIXES = 8  # that half of the prompts begin with
SHOWN = 5  # differences of a run
FEW = 0.7  # share of the pages that full rows need
COUNTS = ("requests", "rows", "prompt_tokens", "new_tokens", "verify_width")

Request = tuple[list[int], SamplingParams]
Texts = list[list[int]]


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("check-deterministic", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--head", default=str(BUILT_IN_HEAD), help="draft head: a directory or hub id")
    add("--tree", default="16:5:4", help="the head's tree, beside its chain of 5")
    add("--verify-width", type=int, default=16, help="nodes that every verification is padded to")
    add("--requests", type=int, default=1000, help="number of requests")
    add("--rows", type=int, default=16, help="requests that run together")
    add("--prompt-tokens", type=int, default=96, help="tokens of a prompt, on average")
    add("--new-tokens", type=int, default=64, help="tokens that a request generates, on average")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--seed", type=int, default=0, help="seed of lengths, prompts and order")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine to be checked."""

    drafter: str
    tree: str
    few_pages: bool = False
    deterministic: bool = True
    alone: bool = False

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        words = [self.drafter if self.drafter in ("none", "ngram") else "head", self.tree]
        words.append("deterministic" if self.deterministic else "ordinary")
        return " ".join([*words, "alone" if self.alone else "batch"])


def setups(args: argparse.Namespace) -> list[Setup]:
    """The first is the reference. Ordinary mode runs what has all pages."""
    tree = f"tree:{args.tree}"
    return [
        Setup("none", "plain", alone=True),
        Setup("none", "plain"),
        Setup("ngram", "chain:5", few_pages=True),
        Setup(args.head, "chain:5"),
        Setup(args.head, tree, few_pages=True),
        Setup("none", "plain", deterministic=False),
        Setup(args.head, "chain:5", deterministic=False),
    ]


def make_requests(args: argparse.Namespace) -> list[Request]:
    encode, middle = TextTokenizer(args.model).encode, Lengths(args.prompt_tokens, args.new_tokens)
    lengths = drawn_lengths(args.requests, middle, 0.5, args.seed)
    wanted = [args.prompt_tokens] * PREFIXES + [own.prompt for own in lengths]
    texts = source_prompts(wanted, encode, args.seed)
    prefixes, prompts = texts[:PREFIXES], texts[PREFIXES:]
    requests = []
    for index, (prompt, own) in enumerate(zip(prompts, lengths, strict=True)):
        if index % 4 < 2:  # of both kinds of sampling
            half = len(prompt) // 2
            prompt = prefixes[index % PREFIXES][:half] + prompt[half:]
        temperature = 0.8 if index % 2 else 0.0
        sampling = SamplingParams(
            temperature=temperature, seed=index, max_tokens=own.new, stop_token_ids=()
        )
        requests.append((prompt, sampling))
    return requests


def make_engine(args: argparse.Namespace, setup: Setup, requests: Sequence[Request]) -> Engine:
    tree = SpeculationConfig.parse(setup.tree)
    if setup.deterministic:
        tree = dataclasses.replace(tree, verify_width=args.verify_width)
    params = load(
        args.model, setup.drafter, speculation=tree, dtype=args.dtype, kernels=args.kernels
    )
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in requests)
    slots = params.speculation.scratch_slots
    pages = args.rows * pages_for(longest + slots, PAGE_SIZE)
    if setup.few_pages:
        pages = max(int(FEW * pages), pages_for(longest + slots, PAGE_SIZE))
    return Engine(
        params,
        CacheConfig(page_size=PAGE_SIZE, max_length=longest, num_pages=pages + 1),
        EngineConfig(
            max_rows=args.rows,
            prefix_caching=not setup.alone,
            deterministic=setup.deterministic,
        ),
    )


def generate(engine: Engine, setup: Setup, requests: Sequence[Request], seed: int) -> Texts:
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    texts: Texts = [[] for _ in requests]
    groups = [[index] for index in order] if setup.alone else [order]
    for group in groups:
        prompts, sampling = zip(*(requests[index] for index in group), strict=True)
        generations = engine.add_all(prompts, sampling)
        engine.finish(generations)
        for index, generation in zip(group, generations, strict=True):
            texts[index] = generation.token_ids
    return texts


def run_setup(
    args: argparse.Namespace, setup: Setup, requests: Sequence[Request], seed: int
) -> tuple[dict[str, Any], Texts]:
    """What was measured, and the texts. Compiling takes no part in the time."""
    engine = make_engine(args, setup, requests)
    generate(engine, setup, requests[: 1 if setup.alone else args.rows], seed)
    compiled, started = engine.programs.compile_seconds, time.perf_counter()
    hits_before, swaps_before = engine.scheduler.cache_statistics()[1], swaps(engine)
    texts = generate(engine, setup, requests, seed)
    compiled = engine.programs.compile_seconds - compiled
    seconds = time.perf_counter() - started - compiled
    result = {
        **setup.describe(),
        "name": setup.name,
        "pages": engine.limits.num_pages,
        "seconds": seconds,
        "tokens": sum(map(len, texts)),
        "tokens_per_second": sum(map(len, texts)) / seconds,
        "hits": engine.scheduler.cache_statistics()[1] - hits_before,
        "swaps": swaps(engine) - swaps_before,
        "programs": engine.programs.compiled,
    }
    return result, texts


def swaps(engine: Engine) -> int:
    return engine.scheduler.preemptions["swap"]


def differences(expected: Texts, found: Texts, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Where texts differ first. Token 0 comes from reading the prompt, later ones from rounds."""
    shown = []
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        place = first_difference(one, other)
        if place is not None:
            prompt, sampling = requests[index]
            shown.append(
                {
                    "request": index,
                    "prompt_tokens": len(prompt),
                    "temperature": sampling.temperature,
                    "token": place,
                    "expected": one[place : place + 4],
                    "found": other[place : place + 4],
                }
            )
    return shown


def measure(args: argparse.Namespace) -> dict[str, Any]:
    for name in COUNTS:
        check_count(f"--{name.replace('_', '-')}", getattr(args, name))
    progress, requests = progress_console(), make_requests(args)
    rows: list[dict[str, Any]] = []
    references: dict[bool, Texts] = {}  # by deterministic
    for seed, setup in enumerate(setups(args), args.seed):
        result, texts = run_setup(args, setup, requests, seed)
        expected = references.setdefault(setup.deterministic, texts)
        differing = differences(expected, texts, requests)
        result["identical"] = len(texts) - len(differing)
        result["differing_first_tokens"] = sum(one["token"] == 0 for one in differing)
        result["differences"] = differing[:SHOWN]
        rows.append(result)
        progress.print(
            f"{setup.name}: {result['identical']} of {len(texts)} identical, "
            f"{result['tokens_per_second']:.0f} tokens/s, {result['hits']} cached tokens, "
            f"{result['swaps']} swaps; compiled {result['programs']}"
        )
        for one in result["differences"]:
            progress.print(f"  {one}")
    facts = {"dtype": args.dtype, "verify_width": args.verify_width, "rows": args.rows}
    return run_facts() | facts | {"requests": len(requests), "runs": rows, "price": price(rows)}


def price(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Tokens/s in deterministic mode as a share of those in ordinary mode, by tree."""
    batches = {
        (row["tree"], row["deterministic"]): row["tokens_per_second"]
        for row in rows
        if not row["alone"]
    }
    return {
        tree: speed / batches[tree, False]
        for (tree, deterministic), speed in batches.items()
        if deterministic and (tree, False) in batches
    }


def make_table(results: dict[str, Any]) -> Table:
    device = results["device"]
    title = f"{results['requests']} requests, {results['rows']} rows, {results['dtype']}, {device}"
    table = Table(title=title)
    for heading in ("run", "pages", "cached tokens", "swaps", "tokens/s", "identical"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for row in results["runs"]:
        pages = "few" if row["few_pages"] else "all"
        counts = (pages, row["hits"], row["swaps"], f"{row['tokens_per_second']:.0f}")
        table.add_row(row["name"], *map(str, counts), str(row["identical"]))
    shares = ", ".join(f"{tree} {share:.0%}" for tree, share in results["price"].items())
    table.caption = f"speed in deterministic mode, of that in ordinary mode: {shares}"
    return table


def run(args: argparse.Namespace) -> None:
    results = measure(args)
    show_results(results, make_table(results), as_json=args.json)
    wrong = [row for row in results["runs"] if row["deterministic"]]
    missing = sum(results["requests"] - row["identical"] for row in wrong)
    if missing:
        raise ValueError(f"{missing} texts differ in deterministic mode")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
