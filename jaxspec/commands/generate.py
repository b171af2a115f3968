"""Generate text by speculative decoding, and report the speed.

Without arguments, the built-in model continues a built-in prompt.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec import (
    LLM,
    Completion,
    SamplingParams,
    SpeculationConfig,
    check_prompts,
    make_mesh,
)
from jaxspec.commands.chat import chat, check_chat_template, typed_lines
from jaxspec.commands.program_cache import (
    default_folder,
    keep_compiled_programs,
    make_folder,
)
from jaxspec.commands.shell import add_model_option, command_parser, progress_console, run_command
from jaxspec.commands.streaming import stream
from jaxspec.comparison import compare, decode_rate
from jaxspec.config.speculation import default_speculation
from jaxspec.llm import load_tokenizer
from jaxspec.loading import choose_drafter

PAIRS = 10
PROMPT = '''import json


def read_config(path):
    """Read a JSON file and return its content as a dictionary."""
'''


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add(
        "--drafter",
        default="auto",
        help="none, ngram, or directory or hub id of an EAGLE head or a draft model (default: the "
        "built-in head for the built-in model, ngram for others)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights and cache (default: float32 on CPU, else bfloat16)",
    )
    add("--tp", type=int, default=1, help="devices that share the model (tensor parallel)")
    add("--shard-drafter", action="store_true", help="split the drafter over the devices too")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add_prompt_options(parser)
    add_comparison_options(parser)
    add_tree_options(parser)
    add_sampling_options(parser)
    add_memory_options(parser)
    return parser


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    group.add_argument("--prompt", help="text to continue (default: a built-in one)")
    group.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="file with the text to continue (default: none)",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="chat on the terminal, through the model's chat template; /exit or Ctrl-D ends it",
    )


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--compare",
        action="store_true",
        help="also decode plainly; report the speed-up and whether the tokens are identical",
    )
    group.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="alternating pairs of a plain and a speculative run, after a warm-up; the medians are "
        f"reported (default: {PAIRS})",
    )


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--tree",
        metavar="SHAPE",
        help="shape of the draft tree: NODES:DEPTH:TOPK (the root is a node; TOPK children of a "
        "node), or chain:K (default: chain:5, on a GPU chain:7)",
    )
    group.add_argument(
        "--acceptance",
        choices=("match", "rejection"),
        default="match",
        help="acceptance rule: match keeps the text of plain decoding, rejection its distribution",
    )
    group.add_argument(
        "--proposal",
        choices=("top_k", "coupled", "sampled"),
        help="how draft tokens are chosen (default: the best that the rule allows)",
    )
    group.add_argument(
        "--verify-width",
        type=int,
        metavar="N",
        help="nodes that every verification is padded to, plain decoding's too, so that all round "
        "alike (default: not padded)",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=200, help="new tokens at most")
    group.add_argument("--temperature", type=float, default=0.5, help="0 is greedy")
    group.add_argument("--top-k", type=int, default=0, help="likeliest tokens kept; 0 keeps all")
    group.add_argument("--top-p", type=float, default=0.9, help="probability kept; 1 keeps all")
    group.add_argument(
        "--min-p", type=float, default=0.0, help="least probability kept, as a share of the largest"
    )
    group.add_argument("--seed", type=int, default=1, help="the same seed gives the same text")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument("--page-size", type=int, default=16, help="tokens of a page of the KV cache")
    group.add_argument(
        "--max-length",
        type=int,
        help="most tokens, prompt included (default: what the model allows, at most 2048)",
    )
    group.add_argument("--num-pages", type=int, help="of the KV cache (default: as needed)")
    group.add_argument(
        "--compilation-cache",
        type=Path,
        metavar="FOLDER",
        help="folder of compiled programs, for faster later starts (default: "
        "$JAX_COMPILATION_CACHE_DIR, else $XDG_CACHE_HOME/jaxspec/compilation, else "
        "~/.cache/jaxspec/compilation)",
    )
    group.add_argument("--no-compilation-cache", action="store_true", help="store no programs")


def speculation_config(arguments: argparse.Namespace) -> SpeculationConfig:
    if arguments.tree is None:
        tree = default_speculation(jax.default_backend())
    else:
        tree = SpeculationConfig.parse(arguments.tree)
    return dataclasses.replace(
        tree,
        acceptance=arguments.acceptance,
        proposal=arguments.proposal,
        verify_width=arguments.verify_width,
    )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
    )


def make_llm(arguments: argparse.Namespace, drafter: str) -> LLM:
    return LLM(
        arguments.model,
        drafter,
        speculation=speculation_config(arguments),
        dtype=arguments.dtype,
        mesh=make_mesh(arguments.tp) if arguments.tp != 1 else None,
        shard_drafter=arguments.shard_drafter,
        kernels=arguments.kernels,
        page_size=arguments.page_size,
        max_length=arguments.max_length,
        num_pages=arguments.num_pages,
        max_batch=1,
    )


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if arguments.pairs is not None and not arguments.compare:
        raise ValueError("--pairs would do nothing: add --compare")
    if arguments.no_compilation_cache and arguments.compilation_cache is not None:
        raise ValueError("--no-compilation-cache goes without --compilation-cache")
    if arguments.chat and (arguments.compare or arguments.json):
        raise ValueError("--chat goes with neither --compare nor --json")


def program_folder(arguments: argparse.Namespace) -> Path | None:
    """The folder of compiled programs; None: they are not stored.

    Raises ValueError if the folder that was asked for cannot be written. If that is the default
    folder, a message is printed instead.
    """
    if arguments.no_compilation_cache:
        return None
    if arguments.compilation_cache is not None:
        return make_folder(arguments.compilation_cache)
    try:
        return make_folder(default_folder())
    except ValueError as error:
        print(f"{error}; going on without", file=sys.stderr)
        return None


def read_prompt(arguments: argparse.Namespace) -> str:
    """The text to continue. Raises ValueError if there is none."""
    if arguments.prompt_file is None:
        text = PROMPT if arguments.prompt is None else arguments.prompt
    else:
        try:
            text = arguments.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {arguments.prompt_file}: {error}") from error
    if not text:
        raise ValueError("the prompt is empty")
    return text


def report(arguments: argparse.Namespace, llm: LLM, completion: Completion) -> dict[str, Any]:
    timings, prompt_tokens = completion.timings, len(completion.prompt_token_ids)
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "num_tokens": len(completion.token_ids),
        "num_prompt_tokens": prompt_tokens,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "seed": completion.seed,
        "num_rounds": completion.num_rounds,
        "acceptance_length": completion.acceptance_length,
        "acceptance_by_depth": completion.acceptance_by_depth,
        "prefill_tokens_per_second": prompt_tokens / timings.prefill,
        "decode_tokens_per_second": decode_rate([completion]),
        "prefill_seconds": timings.prefill,
        "decode_seconds": timings.decode,
        "compile_seconds": timings.compile,
        "model": arguments.model,
        "drafter": str(choose_drafter(arguments.model, arguments.drafter)),
        "device": str(jax.devices()[0].device_kind),
        "kernels": str(llm.engine.kernels),
    }


def summary(results: dict[str, Any]) -> str:
    lines = [f"error: {results['error']}"] if results["error"] else []
    depths = " ".join(f"{share:.0%}" for share in results["acceptance_by_depth"]) or "-"
    lines += [
        f"{results['num_tokens']} tokens in {results['num_rounds']} rounds "
        f"({results['finish_reason']}), acceptance length {results['acceptance_length']:.2f}",
        f"accepted by depth: {depths}",
        f"prefill {results['prefill_tokens_per_second']:.0f} tokens/s, decode "
        f"{results['decode_tokens_per_second']:.1f} tokens/s on {results['device']} "
        f"(kernels: {results['kernels']}; programs ready in {results['compile_seconds']:.1f} s)",
    ]
    if "speedups" in results:
        lines += comparison_lines(results)
    return "\n".join(lines)


def comparison_lines(results: dict[str, Any]) -> list[str]:
    speedups, place = results["speedups"], results["first_difference"]
    plain = results["plain_decode_tokens_per_second"]
    tokens = "identical" if results["identical"] else f"different from number {place} on"
    return [
        f"plain decoding: {plain:.1f} tokens/s; tokens {tokens}",
        f"speed-up: {results['speedup']:.2f}x ({min(speedups):.2f} to {max(speedups):.2f}), like "
        f"both decoding speeds the median of {len(speedups)} alternating pairs",
    ]


def generate(arguments: argparse.Namespace) -> None:
    progress, prompt = progress_console(), read_prompt(arguments)
    sampling, show = sampling_params(arguments), not arguments.json
    check_prompts(arguments.model, [prompt], sampling, arguments.max_length)  # before loading
    with progress.status(f"loading {Path(arguments.model).name}"):
        llm = make_llm(arguments, arguments.drafter)
    if show:
        sys.stdout.write(prompt)
        sys.stdout.flush()
    completion = stream(llm, prompt, sampling, show)
    results = report(arguments, llm, completion)
    if show:
        print("\n")
    if arguments.compare:
        pairs = PAIRS if arguments.pairs is None else arguments.pairs
        with progress.status(f"comparing with plain decoding, {pairs} pairs"):
            plain = make_llm(arguments, "none")
            comparison = compare(llm, plain, prompt, sampling, pairs)
        results |= dataclasses.asdict(comparison)  # replaces the decoding speed by a median
    print(summary(results) if show else json.dumps(results))


def run_chat(arguments: argparse.Namespace) -> None:
    check_chat_template(load_tokenizer(arguments.model), arguments.model)
    with progress_console().status(f"loading {Path(arguments.model).name}"):
        llm = make_llm(arguments, arguments.drafter)
    chat(llm, sampling_params(arguments), typed_lines())


def run(arguments: argparse.Namespace) -> None:
    check(arguments)
    keep_compiled_programs(program_folder(arguments))
    if arguments.chat:
        run_chat(arguments)
    else:
        generate(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
