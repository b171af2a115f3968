"""The requests of `jaxspec bench serving`, as its options describe them."""

import argparse
from collections.abc import Callable

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler, Matcher
from jaxspec.evaluation.benchmarks import workloads
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.evaluation.benchmarks.vocabulary import synthetic_tokenizer
from jaxspec.evaluation.benchmarks.workloads import Arrival, Lengths
from jaxspec.llm.tokenizer import TextTokenizer, load_tokenizer, tokenizer_json
from jaxspec.parallel import check_divides

COMPARED = ("plain", "fixed", "uncached")


def comparisons(text: str) -> tuple[str, ...]:
    """Some of COMPARED, separated by commas."""
    found = tuple(dict.fromkeys(text.split(",")))
    if not set(found) <= set(COMPARED):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(COMPARED)}, got {text}")
    return found


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that make no workload, or do not go together."""
    check_divides("--page-size", args.page_size, max(args.sp, 1))
    if args.shared_prefix < 0:
        raise ValueError(f"--shared-prefix must be at least 0, got {args.shared_prefix}")
    if args.bare and args.dp > 1:
        raise ValueError("--bare times one engine without a scheduler: leave out --dp")
    if args.shape and args.drafter != "auto":
        raise ValueError("--drafter is for models: with --shape the drafter is a random head")
    if args.shape and args.drafter_bits == 4:
        raise ValueError("with --shape give --drafter-quantization w4a16 instead of --drafter-bits")
    for name in ("bare", "quantization", "lm_head_quantization", "drafter_quantization"):
        if getattr(args, name) and not args.shape:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for random weights: give --shape as well")
    if args.drafter_quantization and args.drafter_bits:
        raise ValueError("--drafter-quantization and --drafter-bits exclude each other: take one")
    if args.load and args.rate is not None:
        raise ValueError("--load gives the rates itself: leave out --rate")
    if "fixed" in args.compare and not args.adaptive:
        raise ValueError("--compare fixed is for --adaptive: without it the tree is fixed already")
    if "uncached" in args.compare and args.no_prefix_cache:
        raise ValueError("--compare uncached needs the prefix cache: leave out --no-prefix-cache")
    fewest, most = min(args.requests), max(args.structured)
    if most > fewest:
        raise ValueError(f"--structured must be at most {fewest} requests, got {most}")


# Requests.


def make_arrivals(
    args: argparse.Namespace, count: int, rate: float | None, structured: int = 0
) -> list[Arrival]:
    """So many requests, the first of which have a structured output."""
    times = workloads.arrival_times(count, rate, args.seed)
    prompts, new_tokens = make_prompts(args, count)
    return [
        Arrival(time, tuple(prompt), new, structured=index < structured)
        for index, (time, prompt, new) in enumerate(zip(times, prompts, new_tokens, strict=True))
    ]


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
    wanted = [args.shared_prefix, *(length.prompt for length in lengths)]
    if args.shape:
        vocab_size = SHAPES[args.shape].vocab_size
        prefix, *prompts = workloads.random_prompts(wanted, vocab_size, args.seed)
    else:
        assert encode is not None
        prefix, *cut = workloads.source_prompts(wanted, encode, args.seed)
        prompts = prompts or cut
    return [prefix + prompt for prompt in prompts], [length.new for length in lengths]


def make_matchers(
    args: argparse.Namespace, vocab_size: int, stop_token_ids: tuple[int, ...]
) -> Callable[[StructuredOutput], Matcher]:
    """For an engine of the model, or of random weights, which get a tokenizer of made-up words."""
    if args.shape:
        text, stop_token_ids = synthetic_tokenizer(vocab_size), (vocab_size - 1,)
    else:
        text = tokenizer_json(load_tokenizer(args.model))
    return GrammarCompiler(text, vocab_size, stop_token_ids).matcher
