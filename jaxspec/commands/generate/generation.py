"""What the command `jaxspec generate` does; its options are in __init__.py."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import (
    LLM,
    Completion,
    SamplingParams,
    check_prompts,
)
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.commands.generate import BATCH_ROWS, PAIRS
from jaxspec.commands.generate.chat import chat, check_chat_template, stream, typed_lines
from jaxspec.commands.generate.tree_page import check_page_path, tree_page
from jaxspec.commands.shared.collector import without_collector
from jaxspec.commands.shared.engine_config import engine_config, llm_options
from jaxspec.commands.shared.meshes import engine_meshes
from jaxspec.commands.shared.program_cache import keep_compiled_programs, program_folder
from jaxspec.commands.shared.several_processes import processes_of
from jaxspec.commands.shared.shell import progress_console
from jaxspec.evaluation.number_format import with_interval
from jaxspec.evaluation.speedup import compare
from jaxspec.llm.completion import decode_rate
from jaxspec.llm.tokenizer import TextTokenizer
from jaxspec.parallel.processes import Processes


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        trees=arguments.show_trees is not None,
    )


def make_llm(
    arguments: argparse.Namespace,
    drafter: str,
    tokenizer: TextTokenizer,
    mesh: Mesh | None = None,
    processes: Processes | None = None,
) -> LLM:
    """``mesh`` None: the one that the options ask for."""
    if mesh is None:
        [mesh] = engine_meshes(arguments)
    rows = 1 if arguments.out is None else arguments.max_rows or BATCH_ROWS
    config = engine_config(arguments, rows, plain=drafter == "none")
    compared = drafter == "none" != arguments.drafter  # the plain side of a comparison
    options = dataclasses.replace(
        llm_options(arguments, mesh),
        drafter=drafter,
        drafter_bits=None if compared else arguments.drafter_bits,
        engine=dataclasses.replace(config, trees=arguments.show_trees is not None),
        tokenizer=tokenizer,
        processes=processes,
    )
    return LLM.from_options(options)


def local_program_folder(arguments: argparse.Namespace) -> Path | None:
    """``program_folder``; None for several processes: see docs/parallel.md."""
    if arguments.coordinator is None:
        return program_folder(arguments)
    if arguments.compilation_cache is not None:
        raise ValueError("--compilation-cache goes without --coordinator: see docs/parallel.md")
    return None


def report(arguments: argparse.Namespace, llm: LLM, completion: Completion) -> dict[str, Any]:
    timings, prompt_tokens = completion.timings, len(completion.prompt_token_ids)
    pipeline = llm.engine.programs.pipeline
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
        "stop_tokens": stop_tokens(llm, llm.params.target.config.stop_token_ids),
        "device": str(jax.devices()[0].device_kind),
        "kernels": str(llm.engine.params.kernels),
        "pipeline_bubble": None if pipeline is None else pipeline.bubble,
    }


def stop_tokens(llm: LLM, token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that end a text, and what they say."""
    return [{"id": token, "text": llm.detokenize([token])} for token in token_ids]


def stop_line(tokens: Sequence[dict[str, Any]]) -> str:
    """What --verbose prints of them."""
    told = ", ".join(f"{token['id']} {token['text']!r}" for token in tokens)
    return f"stop tokens: {told or 'none'}"


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
    if results.get("pipeline_bubble") is not None:
        lines.append(f"pipeline: no work in {results['pipeline_bubble']:.0%} of the stages' steps")
    if "speedups" in results:
        lines += comparison_lines(results)
    return "\n".join(lines)


def comparison_lines(results: dict[str, Any]) -> list[str]:
    speedups, place = results["speedups"], results["first_difference"]
    plain = results["plain_decode_tokens_per_second"]
    gain = with_interval(results["speedup"], (min(speedups), max(speedups)), unit="x")
    tokens = "identical" if results["identical"] else f"different from number {place} on"
    return [
        f"plain decoding: {plain:.1f} tokens/s; tokens {tokens}",
        f"speed-up: {gain}, like both decoding speeds the median of {len(speedups)} alternating "
        "pairs",
    ]


def about(results: dict[str, Any]) -> str:
    """What the page of --show-trees says of a run."""
    drafter = "+".join(Path(part).name for part in results["drafter"].split("+"))
    return (
        f"{Path(results['model']).name} with {drafter}: "
        f"{results['num_tokens']} tokens in {results['num_rounds']} rounds, "
        f"{results['acceptance_length']:.2f} tokens a round, on {results['device']}"
    )


def generate(arguments: argparse.Namespace, prompt: str, processes: Processes | None) -> None:
    progress, tokenizer = progress_console(), TextTokenizer(arguments.model)
    sampling, show = sampling_params(arguments), not arguments.json
    # Before any weight is read.
    if arguments.show_trees is not None:
        check_page_path(arguments.show_trees)
    check_prompts(arguments.model, [prompt], sampling, arguments.max_length, tokenizer)
    with progress.status(f"loading {Path(arguments.model).name}"):
        llm = make_llm(arguments, arguments.drafter, tokenizer, None, processes)
    if processes is not None and llm.follow():
        return
    if show:
        sys.stdout.write(prompt)
        sys.stdout.flush()
    completion = stream(llm, prompt, sampling, show)
    results = report(arguments, llm, completion)
    if arguments.show_trees is not None:
        page = tree_page(completion, tokenizer.decode, about(results))
        arguments.show_trees.write_text(page, encoding="utf-8")
    if show:
        print("\n")
    if arguments.compare:
        pairs = PAIRS if arguments.pairs is None else arguments.pairs
        with progress.status(f"comparing with plain decoding, {pairs} pairs"):
            plain = make_llm(arguments, "none", tokenizer)
            comparison = compare(llm, plain, prompt, sampling, pairs)
        results |= dataclasses.asdict(comparison)  # replaces the decoding speed by a median
    print(summary(results) if show else json.dumps(results))
    if show and arguments.verbose:
        print(stop_line(results["stop_tokens"]))


def run_chat(arguments: argparse.Namespace, processes: Processes | None) -> None:
    tokenizer = TextTokenizer(arguments.model)
    check_chat_template(tokenizer.full, arguments.model)
    with progress_console().status(f"loading {Path(arguments.model).name}"):
        llm = make_llm(arguments, arguments.drafter, tokenizer, None, processes)
    if not llm.follow():
        if arguments.verbose:
            stops = (*llm.params.target.config.stop_token_ids, *llm.turn_end())
            print(stop_line(stop_tokens(llm, stops)))
        chat(llm, sampling_params(arguments), typed_lines())


def run(arguments: argparse.Namespace, prompt: str | None) -> None:
    """``prompt`` None: chat."""
    keep_compiled_programs(local_program_folder(arguments))
    with processes_of(arguments) as processes:
        if prompt is None:
            run_chat(arguments, processes)
        else:
            with without_collector():
                generate(arguments, prompt, processes)
