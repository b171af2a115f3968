"""Generate from many prompts plainly and speculatively, and compare the tokens.

In float32 they are the same. In bfloat16, matrix products of different widths round differently, so
near-ties between two tokens can flip. With --verify-width both use the same width and must agree.
Without it, the share of equal texts and the logit gap at each first difference are reported. The
prompts are the first tokens of modules of Python's standard library, so no data is needed.
"""

import argparse
import dataclasses
import platform
import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.commands.shared.engine_config import engine_config, with_memory
from jaxspec.commands.shared.engine_options import (
    DRAFTER_HELP,
    DTYPE_HELP,
    KERNELS_HELP,
    add_kv_options,
    add_memory_options,
    add_mode_options,
)
from jaxspec.commands.shared.shell import (
    add_model_option,
    add_rows,
    command_parser,
    left_table,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.evaluation.acceptance import summarize
from jaxspec.evaluation.speedup import first_difference, logit_gap

# The table's columns, and what their cells show of a row.
COLUMNS = {
    "drafter": "{drafter}",
    "tree": "{num_nodes}:{max_depth}:{top_k}",
    "identical": "{identical} of {prompts}",
    "acceptance length": "{acceptance_length:.2f}",
    "recomputed + swapped": "{preempted}",
    "logit gap, median": "{median:.4f}",
    "largest": "{largest:.4f}",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("check-exactness", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", action="append", help=f"{DRAFTER_HELP}; may be repeated (default: ngram)")
    add("--mode", action="append", help="chain:K or NODES:DEPTH:TOPK; may be repeated (default: "
        "chain:5)")  # fmt: skip
    add("--verify-width", type=int, help="nodes that every verification is padded to, plain "
        "decoding's too, so that all round alike (default: not padded)")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16"), help=DTYPE_HELP)
    add_kv_options(parser)
    add("--prompts", type=int, default=64, help="number of prompts")
    add("--prompt-tokens", type=int, default=96, help="tokens of a prompt")
    add("--max-tokens", type=int, default=256, help="new tokens of each prompt")
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    add("--top-p", type=float, default=1.0, help="probability kept in sampling; 1 keeps all")
    add("--kernels", default="auto", help=KERNELS_HELP)
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    add_mode_options(parser)
    add_memory_options(parser)
    return parser


def library_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The first ``length`` tokens of the first ``count`` library modules that are long enough."""
    prompts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens = llm.tokenizer(path.read_text(encoding="utf-8"))["input_ids"][:length]
        if len(tokens) == length:
            prompts.append(list(tokens))
        if len(prompts) == count:
            return prompts
    raise ValueError(f"only {len(prompts)} library modules have {length} tokens")


def make_llm(arguments: argparse.Namespace, drafter: str, speculation: SpeculationConfig) -> LLM:
    config = engine_config(arguments, arguments.prompts, plain=drafter == "none")
    return LLM(
        arguments.model,
        drafter,
        speculation=speculation,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        kv_scales=arguments.kv_scales,
        kernels=arguments.kernels,
        num_pages=arguments.num_pages,
        engine=with_memory(config, arguments),
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    progress = progress_console()
    trees = [
        dataclasses.replace(SpeculationConfig.parse(mode), verify_width=arguments.verify_width)
        for mode in arguments.mode or ["chain:5"]
    ]
    sampling = [
        SamplingParams(
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=seed,
            max_tokens=arguments.max_tokens,
        )
        for seed in range(arguments.prompts)
    ]
    plain = make_llm(arguments, "none", trees[0])
    prompts = library_prompts(plain, arguments.prompts, arguments.prompt_tokens)
    progress.print(f"plain decoding of {len(prompts)} prompts")
    expected = plain.generate(prompts, sampling)
    rows = []
    for drafter in arguments.drafter or ["ngram"]:
        for tree in trees:
            progress.print(f"{drafter}, {tree.num_nodes} nodes, depth {tree.max_depth}")
            llm = make_llm(arguments, drafter, tree)
            got = llm.generate(prompts, sampling)
            gaps = []
            for wanted, other in zip(expected, got, strict=True):
                index = first_difference(wanted.token_ids, other.token_ids)
                if index is not None:
                    gaps.append(logit_gap(plain.params.target, wanted, other, index))
            rows.append(
                {
                    "drafter": drafter,
                    "num_nodes": tree.num_nodes,
                    "max_depth": tree.max_depth,
                    "top_k": tree.top_k,
                    "identical": len(prompts) - len(gaps),
                    "prompts": len(prompts),
                    "acceptance_length": summarize(got).length,
                    "preemptions": dict(llm.engine.scheduler.preemptions),
                    "logit_gaps": gaps,
                }
            )
    return {
        "model": arguments.model,
        "dtype": str(plain.params.target.embed.dtype),
        "verify_width": plain.params.speculation.verify_width,
        "tokens": sum(len(c.token_ids) for c in expected),
        "kernels": str(plain.engine.params.kernels),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "rows": rows,
    }


def make_table(results: dict[str, Any]) -> Table:
    width = results["verify_width"] or "not fixed"
    title = f"{results['dtype']} on {results['device']}, {results['tokens']} tokens"
    caption = f"verification width: {width}; kernels: {results['kernels']}"
    table = left_table(title, caption, left=["drafter"], right=list(COLUMNS)[1:])
    for row in results["rows"]:
        gaps = row["logit_gaps"]
        shown = {
            "preempted": list(row["preemptions"].values()),
            "median": statistics.median(gaps) if gaps else None,
            "largest": max(gaps, default=None),
        }
        add_rows(table, COLUMNS.values(), [row | shown])
    return table


def run(args: argparse.Namespace) -> None:
    results = measure(args)
    show_results(results, make_table(results), as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
