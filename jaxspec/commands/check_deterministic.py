"""Generate the same texts alone and in full batches in deterministic mode, and compare the tokens.

Every request runs alone first, decoded plainly. Then all of them run together, in another order for
each drafter and tree, for some with so few pages that requests are swapped. The
prompts are cut from the source files of Python's standard library, and half of them begin like
others, so that the prefix cache has them. Every second request samples.

The price is that of a batch for which nothing waits: its tokens/s in deterministic and in ordinary
mode, each the median of several runs in turn.

The exit status is 2 if a text differs in deterministic mode.
"""

import argparse
import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from jaxspec import LLM
from jaxspec.checkpoints.built_in import BUILT_IN_HEAD
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_model_option,
    add_rows,
    command_parser,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.cache import pages_for
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.evaluation.benchmarks.timing import timed
from jaxspec.evaluation.benchmarks.workloads import Lengths, drawn_lengths, source_prompts
from jaxspec.evaluation.speedup import first_difference
from jaxspec.llm.tokenizer import TextTokenizer

PAGE_SIZE = 16
PREFIXES = 8  # that half of the prompts begin with
SHOWN = 5  # differences of a run
FEW = 0.5  # share of the pages that full rows need
LAPS = 5  # of the price
# The table's columns, and what their cells show of a run.
COLUMNS = {
    "run": "{name}",
    "pages": "{pages}",
    "cached tokens": "{hits}",
    "swaps": "{swaps}",
    "tokens/s": "{tokens_per_second:.0f}",
    "identical": "{identical}",
}

Request = tuple[list[int], SamplingParams]
Texts = list[list[int]]


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("check-deterministic", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--head", default=str(BUILT_IN_HEAD), help="draft head: a directory or hub id")
    add("--tree", default="16:5:4", help="the head's tree, beside its chain of 5")
    add("--verify-width", type=number, default=16, help="nodes that every verification is padded "
        "to")  # fmt: skip
    add("--requests", type=number, default=1000, help="number of requests")
    add("--rows", type=number, default=16, help="requests that run together")
    add("--prompt-tokens", type=number, default=96, help="tokens of a prompt, on average")
    add("--new-tokens", type=number, default=64, help="tokens that a request generates, on average")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--seed", type=int, default=0, help="seed of lengths, prompts and order")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine to be checked."""

    drafter: str
    tree: str
    few_pages: bool = False
    deterministic: bool = True
    alone: bool = False

    @property
    def name(self) -> str:
        drafter = {"none": "", "ngram": "n-gram "}.get(self.drafter, "head ")
        return f"{drafter}{self.tree}{', alone' if self.alone else ''}"


def setups(args: argparse.Namespace) -> list[Setup]:
    """The first is the reference."""
    return [
        Setup("none", "plain", alone=True),
        Setup("none", "plain"),
        Setup(args.head, "chain:5"),
        Setup("ngram", "chain:5", few_pages=True),
        Setup(args.head, f"tree:{args.tree}", few_pages=True),
    ]


def make_requests(args: argparse.Namespace) -> list[Request]:
    encode, middle = TextTokenizer(args.model).encode, Lengths(args.prompt_tokens, args.new_tokens)
    lengths = drawn_lengths(args.requests, middle, 0.5, args.seed)
    wanted = [args.prompt_tokens] * PREFIXES + [length.prompt for length in lengths]
    texts = source_prompts(wanted, encode, args.seed)
    prefixes, prompts = texts[:PREFIXES], texts[PREFIXES:]
    requests = []
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if index % 4 < 2:  # of both kinds of sampling
            half = len(prompt) // 2
            prompt = prefixes[index % PREFIXES][:half] + prompt[half:]
        temperature = 0.8 if index % 2 else 0.0
        sampling = SamplingParams(
            temperature=temperature, seed=index, max_tokens=length.new, stop_token_ids=()
        )
        requests.append((prompt, sampling))
    return requests


def longest(requests: Sequence[Request]) -> int:
    return max(len(prompt) + sampling.max_tokens for prompt, sampling in requests)


def make_llm(
    args: argparse.Namespace, setup: Setup, requests: Sequence[Request], tokenizer: TextTokenizer
) -> LLM:
    """An engine that has its programs."""
    tree, length = SpeculationConfig.parse(setup.tree), longest(requests)
    if setup.deterministic:
        tree = dataclasses.replace(tree, verify_width=args.verify_width)
    each = pages_for(length + tree.scratch_slots, PAGE_SIZE)
    pages = max(each, int(FEW * args.rows * each)) if setup.few_pages else args.rows * each
    config = EngineConfig(
        max_rows=args.rows, prefix_caching=not setup.alone, deterministic=setup.deterministic
    )
    llm = LLM(
        args.model,
        setup.drafter,
        speculation=tree,
        dtype=args.dtype,
        kernels=args.kernels,
        page_size=PAGE_SIZE,
        max_length=length,
        num_pages=pages + 1,
        engine=config,
        tokenizer=tokenizer,
    )
    texts_of(llm, full_batch(args, requests))
    return llm


def full_batch(args: argparse.Namespace, requests: Sequence[Request]) -> list[Request]:
    """A request for each row, each as long as it may be."""
    length = longest(requests)
    return [
        (prompt, dataclasses.replace(sampling, max_tokens=length - len(prompt)))
        for prompt, sampling in requests[: args.rows]
    ]


def texts_of(llm: LLM, requests: Sequence[Request]) -> Texts:
    """The tokens of requests that run together."""
    prompts, sampling = zip(*requests, strict=True)
    return [completion.token_ids for completion in llm.generate(prompts, sampling)]


def tokens_per_second(llm: LLM, requests: Sequence[Request]) -> float:
    texts, seconds = timed(texts_of, llm, requests)
    return sum(map(len, texts)) / seconds


def price(
    args: argparse.Namespace, llms: Mapping[Setup, LLM], requests: Sequence[Request]
) -> dict[str, dict[str, float]]:
    """Tokens/s of a full batch in both modes, and the share that is left, by drafter and tree."""
    batch, result = full_batch(args, requests), {}
    for setup, ordinary in llms.items():
        if setup.deterministic:
            continue
        both = llms[dataclasses.replace(setup, deterministic=True)], ordinary
        laps = [[tokens_per_second(llm, batch) for llm in both] for _ in range(LAPS)]
        fixed, other = map(statistics.median, zip(*laps, strict=True))
        result[setup.name] = {"deterministic": fixed, "ordinary": other, "share": fixed / other}
    return result


def run_setup(
    setup: Setup, llm: LLM, requests: Sequence[Request], seed: int
) -> tuple[dict[str, Any], Texts]:
    """What was measured, and the texts."""
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    shuffled, scheduler = [requests[index] for index in order], llm.engine.scheduler
    hits, swaps = scheduler.cache_statistics()[1], scheduler.preemptions["swap"]
    groups = [[request] for request in shuffled] if setup.alone else [shuffled]
    laps = [timed(texts_of, llm, group) for group in groups]
    seconds, found = sum(lap for _, lap in laps), [text for texts, _ in laps for text in texts]
    result = {
        **dataclasses.asdict(setup),
        "name": setup.name,
        "pages": llm.engine.limits.num_pages,
        "seconds": seconds,
        "tokens_per_second": sum(map(len, found)) / seconds,
        "hits": scheduler.cache_statistics()[1] - hits,
        "swaps": scheduler.preemptions["swap"] - swaps,
    }
    return result, [text for _, text in sorted(zip(order, found, strict=True))]


def differences(expected: Texts, found: Texts, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Where texts differ first. Token 0 comes from reading the prompt, later ones from rounds."""
    places = map(first_difference, expected, found)
    return [
        {
            "request": index,
            "prompt_tokens": len(requests[index][0]),
            "temperature": requests[index][1].temperature,
            "token": place,
            "expected": expected[index][place : place + 4],
            "found": found[index][place : place + 4],
        }
        for index, place in enumerate(places)
        if place is not None
    ]


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The price, then one run after the other."""
    progress, requests = progress_console(), make_requests(args)
    checked, tokenizer = setups(args), TextTokenizer(args.model)
    priced = [setup for setup in checked if not setup.few_pages and not setup.alone]
    ordinary = [dataclasses.replace(setup, deterministic=False) for setup in priced]
    started, chosen = time.perf_counter(), [*checked, *ordinary]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # they are compiled side by side
        made = pool.map(lambda setup: make_llm(args, setup, requests, tokenizer), chosen)
        llms = dict(zip(chosen, made, strict=True))
    seconds = time.perf_counter() - started
    progress.print(f"{len(llms)} engines are ready after {seconds:.0f} s")
    cost = price(args, llms, requests)
    facts = {
        **run_facts(),
        "dtype": args.dtype,
        "verify_width": args.verify_width,
        "rows": args.rows,
        "kernels": str(llms[checked[0]].params.kernels),
        "compile_seconds": seconds,
        "requests": len(requests),
        "price": cost,
    }
    yield facts | {"runs": []}
    expected: Texts = []
    for seed, setup in enumerate(checked, args.seed):
        result, texts = run_setup(setup, llms[setup], requests, seed)
        expected = expected or texts
        differing = differences(expected, texts, requests)
        result["identical"] = len(texts) - len(differing)
        result["differing_first_tokens"] = sum(difference["token"] == 0 for difference in differing)
        result["differences"] = differing[:SHOWN]
        progress.print(f"{setup.name}: {result['identical']} of {len(texts)} identical")
        for difference in result["differences"]:
            progress.print(f"  {difference}")
        yield facts | {"tokens": sum(map(len, expected)), "runs": [result]}


def price_line(price: Mapping[str, float]) -> str:
    return (
        f"{price['deterministic']:.0f} tokens/s in deterministic mode, {price['ordinary']:.0f} in "
        f"ordinary mode ({price['share']:.0%})"
    )


def make_tables(results: dict[str, Any]) -> list[Table]:
    lines = [f"{name}: {price_line(price)}" for name, price in results["price"].items()]
    sizes = f"{results['requests']} requests, {results['rows']} rows"
    title = f"{sizes}, {results['dtype']}, {results['device']}"
    first, *others = COLUMNS
    table = left_table(title, "\n".join(["a full batch:", *lines]), left=[first], right=others)
    add_rows(table, COLUMNS.values(), results["runs"])
    return [table]


def run(args: argparse.Namespace) -> None:
    results = show_parts(measure(args), "runs", make_tables, as_json=args.json)
    wrong = sum(results["requests"] - row["identical"] for row in results["runs"])
    if wrong:
        raise ValueError(f"{wrong} texts differ in deterministic mode")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
