"""Measure a drafter's acceptance by mode, temperature and rule, on held-out prompts.

Modes are `chain:K` and `NODES:DEPTH:TOPK` (root included). Rules are `coupled`, `top_k` and
`rejection`. The first two are the matching rule; the drafter ranks children with the target's
sampling noise added, or without it. All are the same at temperature 0. Prompts are the first tokens
of held-out rows of --data; the model writes the answers. Kinds of prompts are told separately: the
"kind" of a JSONL line, without one the name of its file or folder.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.checkpoints.load_drafter import MIXED, choose_drafter
from jaxspec.commands.shared.engine_options import DRAFTER_HELP, add_drafter_bits, add_kv_options
from jaxspec.commands.shared.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.commands.shared.training_options import add_data_options, read_prompts
from jaxspec.config.checks import Problems
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import with_distinct_seeds
from jaxspec.evaluation.acceptance import summarize, summarize_kinds
from jaxspec.evaluation.number_format import with_interval

RULES = ("coupled", "top_k", "rejection")


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("eval-drafter", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help=f"what to measure, not none: {DRAFTER_HELP} (default: "
        "the built-in head for the built-in model, ngram for others)")  # fmt: skip
    add_data_options(parser)
    add("--modes", default="chain:5,tree:60:8:8", help="modes, separated by commas")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="sampling temperatures")
    add("--rules", nargs="+", choices=RULES, default=list(RULES), help="rules, see above")
    add("--prompts", type=int, default=64, help="held-out rows that text is generated from")
    add("--prompt-tokens", type=int, default=64, help="tokens of a prompt; the most of "
        "one from a chat, which ends where the first answer begins")  # fmt: skip
    add("--max-tokens", type=int, default=192, help="new tokens of each prompt")
    add("--batch", type=int, default=16, help="prompts decoded together")
    add("--dtype", choices=("float32", "bfloat16"), help="(default: float32 on CPU, else bfloat16)")
    add_kv_options(parser)
    add_drafter_bits(parser)
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


def speculation_of(mode: str, rule: str) -> SpeculationConfig:
    tree = SpeculationConfig.parse(mode)
    if rule == "rejection":
        return dataclasses.replace(tree, acceptance="rejection")
    return dataclasses.replace(tree, proposal=rule)


def check_modes(modes: Sequence[str]) -> None:
    """Raise ValueError for modes that are no trees, all of them in one."""
    problems = Problems()
    for mode in modes:
        with problems.caught():
            SpeculationConfig.parse(mode)
    problems.raise_all()


def load(args: argparse.Namespace, drafter: str, speculation: SpeculationConfig) -> LLM:
    return LLM(
        args.model,
        drafter,
        speculation=speculation,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        kv_scales=args.kv_scales,
        drafter_bits=args.drafter_bits,
        max_length=args.prompt_tokens + args.max_tokens,
        engine=EngineConfig(max_rows=args.batch),
    )


def evaluate(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    check_modes(args.modes.split(","))  # fails now, not after those before were measured
    prompts, kinds = read_prompts(args, args.prompts, args.prompt_tokens, args.max_tokens, progress)
    drafter = str(choose_drafter(args.model, args.drafter))
    if args.drafter == "auto":  # of the default mixture the head is measured alone
        drafter = drafter.removeprefix(MIXED)
    rows: list[dict[str, Any]] = []
    said: list[str] = []  # by each of the engines
    for mode, rule, temperatures in settings(args):
        with progress.status(f"loading {args.model} and {drafter}"):
            llm = load(args, drafter, speculation_of(mode, rule))
        llm.engine.watch.on_warning = said.append
        for temperature in temperatures:
            progress.print(f"{mode}, {rule}, temperature {temperature:g}")
            sampling = SamplingParams(
                temperature=temperature, seed=args.seed, max_tokens=args.max_tokens
            )
            setting = {"mode": mode, "rule": rule, "temperature": temperature}
            rows.append(setting | measure(llm, prompts, kinds, sampling))
    if said:
        progress.print(f"warning: {said[0]}")
    return {
        "model": str(args.model),
        "drafter": drafter,
        "drafter_bits": args.drafter_bits,
        "device": jax.devices()[0].device_kind,
        "dtype": resolve_dtype(args.dtype).name,
        "kv_dtype": args.kv_dtype,
        "results": rows,
    }


def settings(args: argparse.Namespace) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Each mode and rule, and the temperatures to measure it at: all rules are the same at 0."""
    for mode in args.modes.split(","):
        for rule in args.rules:
            first = rule == args.rules[0]
            temperatures = [value for value in args.temperatures if value != 0 or first]
            if temperatures:
                yield mode, rule, temperatures


def measure(
    llm: LLM, prompts: list[list[int]], kinds: list[str], sampling: SamplingParams
) -> dict[str, Any]:
    """Acceptance over all prompts, and under ``by_kind`` over those of each kind."""
    samplings = with_distinct_seeds(sampling, len(prompts))
    completions = llm.generate(prompts, samplings, progress=True)
    by_kind = summarize_kinds(completions, kinds)
    return dataclasses.asdict(summarize(completions)) | {
        "by_kind": {kind: dataclasses.asdict(found) for kind, found in by_kind.items()}
    }


def make_table(results: dict[str, Any]) -> Table:
    """A row for each setting, and below it for each kind of prompt, where there are several."""
    table = Table(title=f"{results['drafter']} for {results['model']} on {results['device']}")
    for name in ("mode", "temperature", "rule", "prompts", "tokens", "acceptance length (95 %)"):
        table.add_column(name)
    table.add_column("accepted by depth")
    for row in results["results"]:
        table.add_row(row["mode"], f"{row['temperature']:g}", row["rule"], *cells("all", row))
        if len(row["by_kind"]) > 1:
            for kind, found in row["by_kind"].items():
                table.add_row("", "", "", *cells(kind, found))
        table.add_section()
    return table


def cells(kind: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """The last cells of a row: what was found with the prompts of a kind."""
    return (
        f"{found['prompts']} {kind}",
        f"{found['tokens']:,}",
        with_interval(found["length"], found["length_interval"]),
        " ".join(f"{share:.0%}" for share in found["by_depth"]),
    )


def run(args: argparse.Namespace) -> None:
    results = evaluate(args, progress_console())
    show_results(results, make_table(results), as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
