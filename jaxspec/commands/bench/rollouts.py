"""Time the rollouts of reinforcement learning: plain, speculative, with a learning head, repaired.

A policy learns by GRPO to write Python that compiles. In each step every engine writes the same
samples, with the same seeds and weights, in turn: one without a drafter, the default one, one whose
EAGLE head learns from the samples of each step, and one whose rollouts began under the weights of
the step before and are repaired at the weight sync (`in_flight="repair"`). The last begins its
samples while the policy learns, as an asynchronous trainer does, and only the time after the sync
is counted: what it computes before that hides behind the learning where the trainer has devices of
its own. On one device both share it. Programs that decode are compiled before the first step, and
what learns in it: it is not counted.

The texts of all engines are compared: in float32 they are the same.
"""

import argparse
import dataclasses
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.commands.bench.rollouts_plot import plot_rollouts
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_model_option,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.commands.shared.training_options import add_choice_options, read_prompts
from jaxspec.config.checks import Problems
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.seeds import group_seeds
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.warm_up.compile_all import Progress
from jaxspec.evaluation.bootstrap import median
from jaxspec.llm.llm import LLM
from jaxspec.training.heads.loss import LossConfig
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.online import HeadAdapter, learning_drafter
from jaxspec.training.policy import Policy
from jaxspec.training.rewards import compiles

PLAIN, SPECULATIVE, LEARNING, REPAIR = "plain", "speculative", "learning head", "repair"
ENGINES = (PLAIN, SPECULATIVE, LEARNING, REPAIR)
UNROLL = 4  # steps of the head's training-time test


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench rollouts", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help="of all engines but the plain one")
    add("--tree", help="their draft tree: chain:K or NODES:DEPTH:TOPK (default: they choose their "
        "trees by what pays)")  # fmt: skip
    add("--data", type=Path, nargs="+", required=True, help="folders or files of prompts; of chats "
        "the question is the prompt")  # fmt: skip
    add_choice_options(parser)
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="what is compared")
    add("--steps", type=number, default=20, help="of the training, the first included")
    add("--prompts", type=number, default=8, help="of a step")
    add("--samples", type=number, default=8, help="of each prompt")
    add("--prompt-tokens", type=number, default=256, help="most tokens of a prompt")
    add("--tokens", type=number, default=512, help="most new tokens of a sample")
    add("--temperature", type=float, default=1.0, help="sampling temperature")
    add("--learning-rate", type=float, default=1e-6, help="of the policy's Adam")
    add("--head-steps", type=number, default=4, help="training steps of the head after each step")
    add("--head-learning-rate", type=float, default=1e-4, help="of the head's training")
    add("--dtype", choices=("float32", "bfloat16"), help="of the engines; the policy learns in "
        "float32 (default: float32 on CPU, else bfloat16)")  # fmt: skip
    add("--deterministic", action="store_true", help="bfloat16 texts do not depend on the drafter")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--plot", type=Path, help="write tokens a round and rewards by step as a PNG")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What an engine wrote in a step.

    Attributes:
      seconds: until all samples were there, the weight sync included.
      sync_seconds: of the weight sync.
      trees: rounds of the engine by draft tree, whatever the number of rows.
    """

    generations: list[Generation]
    seconds: float
    sync_seconds: float
    trees: dict[str, int]

    @property
    def written(self) -> int:
        return sum(len(each.token_ids) for each in self.generations)

    @property
    def rounds(self) -> list[int]:
        return [each.statistics.rounds for each in self.generations]


class Bench:
    """The engines and the policy."""

    def __init__(self, args: argparse.Namespace, prompts: list[list[int]]):
        self.args, self.prompts = args, prompts
        self.speculation = None if args.tree is None else SpeculationConfig.parse(args.tree)
        self.length = max(map(len, prompts)) + args.tokens
        self.llms: dict[str, LLM] = {}
        for name in dict.fromkeys([PLAIN, *args.engines]):  # the others are compared with plain
            self.llms[name] = self._llm("none" if name == PLAIN else args.drafter)
        target = self.llms[PLAIN].params.target
        self.policy = Policy(target, args.learning_rate, self.length, args.temperature)
        self.adapter = self._adapter() if LEARNING in self.llms else None
        self.version = 0
        self.began: dict[str, list[Generation]] = {}  # rollouts under way before a weight sync

    def _llm(self, drafter: str) -> LLM:
        args = self.args
        rows = args.prompts * args.samples
        shared = self.llms[PLAIN].params.target if self.llms else None
        return LLM(
            args.model,
            drafter,
            speculation=self.speculation if drafter != "none" else None,
            dtype=args.dtype,
            max_length=self.length,
            engine=EngineConfig(max_rows=rows, deterministic=args.deterministic),
            target=shared,
        )

    def _adapter(self) -> HeadAdapter:
        args, llm = self.args, self.llms[LEARNING]
        config = DraftTrainConfig(
            loss=LossConfig.for_method(learning_drafter(llm.params.drafter).head.method, UNROLL),
            batch_size=min(16, args.prompts * args.samples),
            learning_rate=args.head_learning_rate,
            warmup_steps=args.head_steps,
            seed=args.seed,
            compute_dtype=str(llm.params.target.embed.dtype),  # pyright: ignore[reportArgumentType]
        )
        return HeadAdapter(llm, config, length=self.length)

    def requests(self, step: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """The prompts of a step, each so often as it has samples, and how each is sampled."""
        args, count = self.args, self.args.prompts
        places = [(step * count + place) % len(self.prompts) for place in range(count)]
        ids = np.asarray(places, np.uint32)
        seeds = np.asarray(group_seeds(args.seed, ids, args.samples, epoch=step))
        sampling = [
            SamplingParams(temperature=args.temperature, seed=int(seed), max_tokens=args.tokens)
            for seed in seeds.reshape(-1)
        ]
        return [self.prompts[place] for place in places for _ in range(args.samples)], sampling

    def warm_up(self, name: str, on_progress: Progress) -> float:
        """Compile an engine's programs for all rows and a few; returns the seconds that it took."""
        _, sampling = self.requests(0)
        rows = len(sampling)
        fewer = [max(1, rows // 2**power) for power in range(4)]  # most samples end together
        return self.llms[name].engine.warm_up(
            sampling[:1],
            tokens=self.length,
            rows=fewer,
            old_texts=name == REPAIR,
            on_progress=on_progress,
        )

    def sync(self, name: str) -> float:
        """Give the policy's weights to an engine; returns the seconds that it took."""
        started = time.perf_counter()
        in_flight = "repair" if name == REPAIR else "refuse"
        llm = self.llms[name]
        llm.use_target(self.policy.served, version=self.version, in_flight=in_flight)
        jax.block_until_ready(llm.params.target)
        return time.perf_counter() - started

    def write(self, name: str, step: int) -> Rollouts:
        """The samples of a step, under the weights of that step."""
        engine, began = self.llms[name].engine, self.began.pop(name, None)
        rounds_before = engine.shapes.rounds.copy()
        started = time.perf_counter()
        sync = self.sync(name) if step else 0.0
        if began is None:
            generations = engine.add_all(*self.requests(step))
        else:
            generations = [self._verified(engine, each) for each in began]
        engine.finish(generations)
        seconds = time.perf_counter() - started
        rounds = engine.shapes.rounds - rounds_before
        return Rollouts(generations, seconds, sync, {each.name: rounds[each] for each in rounds})

    def _verified(self, engine: Engine, generation: Generation) -> Generation:
        """A rollout under the weights in use; one that had ended before is a draft of it."""
        if generation.version == self.version:
            return generation
        draft = generation.token_ids
        return engine.add(generation.prompt, generation.sampling, draft=draft)

    def learn(self, rollouts: Rollouts, step: int) -> dict[str, float]:
        """Reward the samples and learn from them; the rollouts of the next step begin meanwhile."""
        args, tokenizer = self.args, self.llms[PLAIN].tokenizer
        prompts = [list(each.prompt) for each in rollouts.generations]
        written = [list(each.token_ids) for each in rollouts.generations]
        rewards = np.array(
            [
                compiles(str(tokenizer.decode(ids)), str(tokenizer.decode(prompt)))
                for prompt, ids in zip(prompts, written, strict=True)
            ]
        ).reshape(args.prompts, args.samples)
        started = time.perf_counter()
        divergence = self.policy.learn(prompts, written, rewards)
        seconds = time.perf_counter() - started
        self.version += 1
        if REPAIR in self.llms and step + 1 < args.steps:
            self._begin(step + 1, seconds)
        return {"reward": float(rewards.mean()), "seconds": seconds, "kl_per_token": divergence}

    def _begin(self, step: int, seconds: float) -> None:
        """Begin the rollouts of a step under the old weights, for as long as learning took."""
        engine = self.llms[REPAIR].engine
        started = time.perf_counter()
        self.began[REPAIR] = engine.add_all(*self.requests(step))
        while time.perf_counter() < started + seconds and not engine.is_idle:
            engine.step()


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One part for each step."""
    check(args)
    count = args.steps * args.prompts
    prompts, _ = read_prompts(args, count, args.prompt_tokens, args.tokens, console)
    with console.status("loading"):
        bench = Bench(args, prompts)
    facts = {**run_facts(), "arguments": {name: plainly(x) for name, x in vars(args).items()}}
    names = list(bench.llms)
    for name in names:
        with console.status(f"{name}: compiling") as status:
            seconds = bench.warm_up(
                name,
                lambda done, of, name=name, status=status: status.update(
                    f"{name}: compiled {done} of {of} programs"
                ),
            )
        console.print(f"{name}: programs compiled in {seconds:.0f} s")
    for step in range(args.steps):
        turned = names[step % len(names) :] + names[: step % len(names)]
        rollouts = {}
        for name in turned:
            with console.status(f"step {step}: {name}"):
                rollouts[name] = bench.write(name, step)
            if not step:
                console.print(f"{name}: {rollouts[name].seconds:.1f} s, compiling included")
        learned = bench.learn(rollouts[PLAIN], step)
        if bench.adapter is not None:
            bench.adapter.learn_ids(
                [(each.prompt, each.token_ids) for each in rollouts[LEARNING].generations],
                args.head_steps,
            )
        rows = [figures(name, step, rollouts[name], rollouts[PLAIN]) for name in names]
        console.print(
            f"step {step}: reward {learned['reward']:.2f}, KL {learned['kl_per_token']:.1e}; "
            + ", ".join(f"{row['engine']} {row['seconds']:.2f} s" for row in rows)
        )
        yield facts | {"rows": [{**row, "learned": learned} for row in rows]}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot work, all at once, before anything is loaded."""
    problems = Problems()
    if args.steps < 3:
        problems.add("--steps must be at least 3: the first step compiles")
    if args.temperature <= 0:
        problems.add("--temperature must be above 0: a gradient needs samples that differ")
    if args.deterministic and REPAIR in args.engines:
        others = " ".join(shlex.quote(name) for name in args.engines if name != REPAIR)
        problems.add(
            "--deterministic cannot be with repair, as old texts are not read there: give "
            f"--engines {others or SPECULATIVE}"
        )
    if args.tree is not None:
        try:
            SpeculationConfig.parse(args.tree)
        except ValueError as error:
            problems.add(f"--tree: {error}")
    problems.raise_all()


def plainly(value: Any) -> Any:
    """An option's value as JSON has it."""
    if isinstance(value, list):
        return [plainly(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def figures(name: str, step: int, rollouts: Rollouts, plain: Rollouts) -> dict[str, Any]:
    pairs = zip(rollouts.generations, plain.generations, strict=True)
    slowest = int(np.argmax(rollouts.rounds))
    return {
        "engine": name,
        "step": step,
        "seconds": rollouts.seconds,
        "speedup": plain.seconds / rollouts.seconds,
        "sync_seconds": rollouts.sync_seconds,
        "tokens": rollouts.written,
        "kept": sum(each.kept_tokens for each in rollouts.generations),  # of old texts
        "tokens_per_round": rollouts.written / max(1, sum(rollouts.rounds)),
        "trees": rollouts.trees,
        "equal": sum(a.token_ids == b.token_ids for a, b in pairs),
        "samples": len(rollouts.generations),
        "slowest": {
            "sample": slowest,
            "rounds": rollouts.rounds[slowest],
            "tokens": len(rollouts.generations[slowest].token_ids),
        },
    }


def make_tables(results: dict[str, Any]) -> list[Table]:
    """A row for each engine, over all steps but the first."""
    names = dict.fromkeys(row["engine"] for row in results["rows"])
    columns = ("rollouts", "of all steps", "speed-up of a step", "sync", "tokens a round",
               "rounds of a step", "slowest sample", "equal to plain")  # fmt: skip
    table = left_table(device_line(results), results["command"], left=("engine",), right=columns)
    totals = {}
    for name in names:
        rows = [row for row in results["rows"] if row["engine"] == name and row["step"]]
        if not rows:
            continue
        totals[name] = sum(row["seconds"] for row in rows)
        speedup, (low, high) = median(np.array([row["speedup"] for row in rows]))
        syncs = [row["sync_seconds"] for row in rows]
        slowest = max(rows, key=lambda row: row["slowest"]["rounds"])
        table.add_row(
            name,
            f"{totals[name]:.2f} s",
            f"{totals[PLAIN] / totals[name]:.2f}x",
            f"{speedup:.2f}x ({low:.2f} to {high:.2f})",
            f"{1000 * float(np.median(syncs)):.1f} ms",
            f"{np.mean([row['tokens_per_round'] for row in rows]):.2f}",
            ", ".join(
                f"{tree} {np.mean([row['trees'].get(tree, 0) for row in rows]):.0f}"
                for tree in sorted({tree for row in rows for tree in row["trees"]})
            ),
            "step {step}, sample {slowest[sample]}: {slowest[tokens]} tokens, {slowest[rounds]} "
            "rounds".format(**slowest),
            f"{sum(row['equal'] for row in rows)} of {sum(row['samples'] for row in rows)}",
        )
    return [table]


def run(args: argparse.Namespace) -> None:
    results = show_parts(measure(args, progress_console()), "rows", make_tables, as_json=args.json)
    if args.plot is not None:
        plot_rollouts(results, args.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
