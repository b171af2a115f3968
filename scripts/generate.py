"""Generate text speculatively, and say how fast it went.

Needs no arguments: the built-in model continues a built-in prompt.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from jaxspec import (
    BUILT_IN_MODEL,
    LLM,
    Completion,
    SamplingParams,
    SpeculationConfig,
    make_mesh,
)
from jaxspec.comparison import compare
from jaxspec.config import default_speculation
from jaxspec.loading import choose_drafter

COMPILATION_CACHE = Path.home() / ".cache" / "jaxspec" / "compilation"
PROMPT = '''import json


def read_config(path):
    """Read a JSON file and return its content as a dictionary."""
'''


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=str(BUILT_IN_MODEL), help="model directory or hub id")
    add(
        "--drafter",
        default="auto",
        help="none, ngram, or directory or hub id of an EAGLE head or a draft model; by default "
        "the built-in head for the built-in model, ngram for others",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, else bfloat16")
    add("--tp", type=int, default=1, help="devices that share the model (tensor parallel)")
    add("--shard-drafter", action="store_true", help="split the drafter over the devices too")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add(
        "--compilation-cache",
        default=str(COMPILATION_CACHE),
        help="folder that keeps compiled programs for the next start, or none; default "
        "~/.cache/jaxspec/compilation",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    add(
        "--compare",
        action="store_true",
        help="also decode plainly; report whether tokens are identical, and the speed-up",
    )
    prompts = parser.add_argument_group("prompt")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--prompt-file", type=Path, help="file that holds the text to continue")
    tree = parser.add_argument_group("draft tree", "by default a chain of 5, on a GPU of 7")
    tree.add_argument("--depth", type=int, help="depth of the tree (5)")
    tree.add_argument("--top-k", type=int, help="children per node (1, a chain)")
    tree.add_argument("--nodes", type=int, help="nodes of the tree, root included")
    tree.add_argument("--acceptance", choices=("match", "rejection"), default="match")
    tree.add_argument("--proposal", choices=("top_k", "coupled", "sampled"))
    tree.add_argument(
        "--verify-width",
        type=int,
        help="verify (and decode plainly) at this width, so that rounding cannot differ",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=200)
    sampling.add_argument("--temperature", type=float, default=0.5)
    sampling.add_argument("--sample-top-k", type=int, default=0, help="0 keeps all tokens")
    sampling.add_argument("--top-p", type=float, default=0.9)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, default=1)
    cache = parser.add_argument_group("cache")
    cache.add_argument("--page-size", type=int, default=16)
    cache.add_argument("--max-length", type=int, help="most tokens, prompt included")
    cache.add_argument("--num-pages", type=int, help="budget of KV pages (default: as needed)")
    return parser.parse_args(arguments)


def speculation_config(arguments: argparse.Namespace) -> SpeculationConfig:
    depth, top_k, nodes = arguments.depth, arguments.top_k, arguments.nodes
    if depth is top_k is nodes is None:
        tree = default_speculation(jax.default_backend())
    else:
        depth, top_k = (5 if depth is None else depth), (1 if top_k is None else top_k)
        if nodes is None:
            nodes = depth + 1 if top_k == 1 else 4 * depth
        tree = SpeculationConfig(num_nodes=nodes, max_depth=depth, top_k=top_k)
    return dataclasses.replace(
        tree,
        acceptance=arguments.acceptance,
        proposal=arguments.proposal,
        verify_width=arguments.verify_width,
    )


def keep_compiled_programs(folder: str) -> None:
    """Take compiled programs from a folder, and put those in it that are not there yet."""
    if folder == "none":
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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


def read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        return PROMPT if arguments.prompt is None else arguments.prompt
    try:
        return arguments.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {arguments.prompt_file}: {error}") from error


def stream(llm: LLM, prompt: str, sampling: SamplingParams, show: bool) -> Completion:
    """Generate, writing text to stdout as it comes."""
    if show:
        sys.stdout.write(prompt)
        sys.stdout.flush()
    for event in llm.stream([prompt], sampling):
        if isinstance(event, Completion):
            return event
        if show:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    raise AssertionError("a stream ends with its completion")


def report(arguments: argparse.Namespace, llm: LLM, completion: Completion) -> dict[str, object]:
    timings, count = completion.timings, len(completion.token_ids)
    prompt_tokens = len(completion.prompt_token_ids)
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "num_tokens": count,
        "num_prompt_tokens": prompt_tokens,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "seed": completion.seed,
        "num_rounds": completion.num_rounds,
        "acceptance_length": completion.acceptance_length,
        "acceptance_by_depth": completion.acceptance_by_depth,
        "prefill_tokens_per_second": prompt_tokens / timings.prefill,
        "decode_tokens_per_second": (count - 1) / timings.decode if timings.decode else 0.0,
        "prefill_seconds": timings.prefill,
        "decode_seconds": timings.decode,
        "compile_seconds": timings.compile,
        "model": arguments.model,
        "drafter": str(choose_drafter(arguments.model, arguments.drafter)),
        "device": str(jax.devices()[0].device_kind),
        "kernels": str(llm.engine.kernels),
    }


def print_summary(console: Console, results: dict) -> None:
    if results["error"]:
        console.print(f"error: {results['error']}")
    depths = "  ".join(f"{share:.0%}" for share in results["acceptance_by_depth"]) or "-"
    console.print(
        f"{results['num_tokens']} tokens in {results['num_rounds']} rounds "
        f"({results['finish_reason']}), acceptance length {results['acceptance_length']:.2f}"
    )
    console.print(f"accepted by depth: {depths}")
    console.print(
        f"prefill {results['prefill_tokens_per_second']:.0f} tokens/s, decode "
        f"{results['decode_tokens_per_second']:.1f} tokens/s on {results['device']} "
        f"(kernels: {results['kernels']}; programs ready in {results['compile_seconds']:.1f} s)"
    )
    if "identical" in results:
        console.print(f"identical: {'yes' if results['identical'] else 'no'}")
        console.print(
            f"speed-up over plain decoding: {results['speedup']:.2f}x (medians of alternating "
            f"runs, {results['speculative_decode_tokens_per_second']:.1f} against "
            f"{results['plain_decode_tokens_per_second']:.1f} tokens/s)"
        )


def run(arguments: argparse.Namespace) -> None:
    progress = Console(stderr=True)
    keep_compiled_programs(arguments.compilation_cache)
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.sample_top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
    )
    prompt = read_prompt(arguments)
    with progress.status(f"loading {Path(arguments.model).name}"):
        llm = make_llm(arguments, arguments.drafter)
    completion = stream(llm, prompt, sampling, show=not arguments.json)
    results = report(arguments, llm, completion)
    if arguments.compare:
        with progress.status("decoding plainly, to compare"):
            plain = make_llm(arguments, "none")
            results |= dataclasses.asdict(compare(llm, plain, prompt, sampling))
    if arguments.json:
        print(json.dumps(results))
        return
    print("\n")
    print_summary(Console(highlight=False), results)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(parse_arguments(arguments))
    except ValueError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
