"""Change a policy's weights while rollouts are under way: repair them, or restart them.

Samples of a few prompts are under way, and each has written some tokens, when the weights move
along a policy gradient of other samples. `restart` generates the rollouts anew. `repair` reads what
they have as a draft, keeps what the new weights write too, and goes on from there: in float32 the
texts are the same. "As before" is how the rollouts go on under the old weights.

KL (in nats) and total variation are those of the two policies, per token. Kept tokens are those of
the old text that were kept; untouched texts kept all of it. Wrong texts are others than fresh
requests write under the same weights. Times are from the change to the last token, the median of
some runs, and rounds those after the change. Rollouts that have ended by then count nowhere.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.engine_options import (
    AUTO_DRAFTER_HELP,
    add_program_options,
    check_program_options,
)
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.program_cache import keep_compiled_programs, program_folder
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_model_option,
    add_rows,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.evaluation.benchmarks.repair import (
    Outcome,
    Rollouts,
    common_prefix,
    divergence,
    facts_of,
    moved,
)
from jaxspec.evaluation.benchmarks.workloads import source_prompts
from jaxspec.llm.llm import LLM
from jaxspec.models.decoder import Decoder
from jaxspec.training.grpo import RolloutBatch, group_advantages, policy_gradient, rollout_batch

OTHERS = 1000  # seeds from here on are those of the samples that the gradient is of
WAYS = ("repair", "restart")
# The table's columns, and what their cells show of a step.
COLUMNS = {
    "step": "{size:g}",
    "KL": "{kl:.2g}",
    "TV": "{tv:.2g}",
    "kept": "{kept:.1f}/{written:.1f}",
    "untouched": "{untouched:.0%}",
    "rounds: repair": "{repair[mean_rounds]:.1f}",
    "restart": "{restart[mean_rounds]:.1f}",
    "as before": "{undisturbed[mean_rounds]:.1f}",
    "seconds: repair": "{repair[seconds]:.2f}",
    "restart ": "{restart[seconds]:.2f}",
    "as before ": "{undisturbed[seconds]:.2f}",
    "wrong texts": "{wrong_texts}",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench repair", __doc__)
    add_model_option(parser)
    add = parser.add_argument
    add("--drafter", default="auto", help=AUTO_DRAFTER_HELP)
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="weights and cache. In "
        "bfloat16 a small step rounds to none, and texts may differ by rounding")  # fmt: skip
    add("--steps", type=float, nargs="+", default=[1e-5, 3e-5, 1e-4, 3e-4], metavar="SIZE",
        help="norms of the steps, as shares of the weights' norm")  # fmt: skip
    add("--prompts", type=number, default=4, help="prompts, cut from Python's own source files")
    add("--samples", type=number, default=4, help="rollouts of each")
    add("--prompt-tokens", type=number, default=24, help="of each prompt")
    add("--new-tokens", type=number, default=96, help="of each rollout")
    add("--written", type=number, default=48, help="tokens that the rollouts have as the weights "
        "change, in the mean")  # fmt: skip
    add("--temperature", type=float, default=1.0, help="of the rollouts, above 0")
    add("--repeats", type=number, default=3, help="runs of each way, after one that compiles")
    add("--json", action="store_true", help=JSON_PARTS)
    add_program_options(parser)
    return parser


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One part for each size of step."""
    if args.written >= args.new_tokens:
        raise ValueError(f"--written must be below --new-tokens ({args.new_tokens})")
    if args.temperature <= 0:
        raise ValueError("--temperature must be above 0: a gradient needs samples that differ")
    check_program_options(args)
    keep_compiled_programs(program_folder(args))
    count = args.prompts * args.samples
    config = EngineConfig(max_rows=count, adaptive=False)
    llm = LLM(args.model, args.drafter, dtype=args.dtype, engine=config)
    prompts = [prompt for prompt in cut_prompts(args, llm) for _ in range(args.samples)]
    rollouts = make_rollouts(args, llm, prompts, range(count))
    others = make_rollouts(args, llm, prompts, range(OTHERS, OTHERS + count))
    old = llm.engine.params.target
    console.print(f"{count} rollouts of {args.new_tokens} tokens under the old weights")
    texts = rollouts.texts(old)
    rewarded = others.texts(old)
    advantages = group_advantages(rewards_of(rewarded).reshape(-1, args.samples))
    batch = padded(prompts, rewarded, advantages)
    gradient = policy_gradient(old, batch, args.temperature)
    for size in args.steps:
        new = moved(old, gradient, size)
        part = {"size": size, **compare(args, rollouts, old, new, texts)}
        console.print(
            f"step {size:g}: repair {part['repair']['seconds']:.2f} s, restart "
            f"{part['restart']['seconds']:.2f} s"
        )
        folder = args.compilation_cache and str(args.compilation_cache)
        arguments = vars(args) | {"compilation_cache": folder}
        yield {**run_facts(), "arguments": arguments, "timings": [part]}


def rewards_of(texts: Sequence[Sequence[int]]) -> np.ndarray:
    """The share of different tokens among each text's: float64 [B]."""
    return np.array([len(set(text)) / len(text) for text in texts])


def padded(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], advantages: np.ndarray
) -> RolloutBatch:
    """Prompts and texts in one batch, no wider than the longest."""
    longest = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True))
    return rollout_batch(prompts, texts, advantages, longest)


def cut_prompts(args: argparse.Namespace, llm: LLM) -> list[list[int]]:
    def encode(text: str) -> list[int]:
        return llm.tokenize([text])[0] if text else []

    return source_prompts([args.prompt_tokens] * args.prompts, encode, seed=0)


def make_rollouts(
    args: argparse.Namespace, llm: LLM, prompts: Sequence[Sequence[int]], seeds: range
) -> Rollouts:
    sampling = [
        SamplingParams(
            temperature=args.temperature, seed=seed, max_tokens=args.new_tokens, stop_token_ids=()
        )
        for seed in seeds
    ]
    return Rollouts(llm.engine, prompts, sampling, args.written)


def compare(
    args: argparse.Namespace,
    rollouts: Rollouts,
    old: Decoder,
    new: Decoder,
    old_texts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """The figures of one step: the ways in turn, so that a machine's drift is the same for each."""
    new_texts = rollouts.texts(new)
    runs: dict[str, list[Outcome]] = {name: [] for name in (*WAYS, "undisturbed")}
    for _ in range(1 + args.repeats):
        runs["repair"].append(rollouts.change(old, new, "repair"))
        runs["restart"].append(rollouts.change(old, new, "restart"))
        runs["undisturbed"].append(rollouts.change(old, old, "repair"))
    figures: dict[str, Any] = {}
    for name, outcomes in runs.items():
        expected = old_texts if name == "undisturbed" else new_texts
        figures[name] = facts_of(outcomes[-1], expected)
        figures[name]["runs"] = [outcome.seconds for outcome in outcomes[1:]]
        figures[name]["seconds"] = statistics.median(figures[name]["runs"])
    repaired = runs["repair"][-1]
    untouched = [
        common_prefix(old_texts[place], new_texts[place]) >= written
        for place, written in zip(repaired.places, repaired.written, strict=True)
    ]
    batch = padded(rollouts.prompts, old_texts, np.zeros(len(old_texts)))
    kl, tv = divergence(old, new, batch.tokens, batch.lengths, batch.written, args.temperature)
    return {
        "kl": kl,
        "tv": tv,
        "kept": figures["repair"]["kept"],
        "written": statistics.mean(repaired.written),
        "untouched": statistics.mean(untouched),
        "wrong_texts": sum(figures[name]["wrong_texts"] for name in runs),
        **figures,
    }


def make_tables(results: dict[str, Any]) -> list[Table]:
    arguments = results["arguments"]
    rollouts = arguments["prompts"] * arguments["samples"]
    title = (
        f"{rollouts} rollouts of {arguments['new_tokens']} tokens, temperature "
        f"{arguments['temperature']:g}, {arguments['dtype']}, {device_line(results)}"
    )
    table = left_table(title, results["command"], right=COLUMNS)
    add_rows(table, COLUMNS.values(), results["timings"])
    return [table]


def run(args: argparse.Namespace) -> None:
    parts = measure(args, progress_console())
    show_parts(parts, "timings", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
