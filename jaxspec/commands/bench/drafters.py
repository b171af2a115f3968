"""Compare drafters over one target, with real text: speed, acceptance and memory.

Every batch of held-out prompts is decoded plainly and with each --run, for each temperature and
batch size. A batch's speed is the sum of its texts', each until it ends: what a server reaches
whose rows are always taken. Speeds are medians over the batches. A run is a drafter (as in
generate) and one mode or several: `chain:K`, `NODES:DEPTH:TOPK`, or `default`, what an engine does
to which no tree is given (it adapts: docs/serving.md). All texts have --max-tokens tokens: stop
tokens do not end them. Acceptance is counted in the same texts, with 95 % bootstrap intervals over
prompts. All runs share the target's weights, and programs are compiled side by side. --by-file
keeps kinds of prompts separate. --from shows what other runs measured, on any machine.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.commands.bench.drafter_files import CHOICES, read_parts
from jaxspec.commands.bench.drafter_markdown import as_markdown
from jaxspec.commands.bench.drafter_plot import plot_drafters
from jaxspec.commands.bench.drafter_tables import full_width, make_tables
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.program_cache import keep_compiled_programs, make_folder
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_model_option,
    collect_parts,
    command_parser,
    given_option,
    progress_console,
    run_command,
    table_console,
)
from jaxspec.commands.shared.training_options import DATA_HELP, add_choice_options, read_prompts
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.memory import bytes_of_token
from jaxspec.evaluation.prepare_race import prepare_race
from jaxspec.evaluation.speedup import race
from jaxspec.llm.text_drafts.drafter import TextDrafter
from jaxspec.llm.text_drafts.model_source import ModelSource
from jaxspec.llm.tokenizer.text import TextTokenizer
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.bytes import local_bytes
from jaxspec.training.heads.data import spread_rows

PLAIN_RUN = ("none", "plain")
DEFAULT_RUNS = (("ngram", "chain:5"), ("auto", "chain:5"))
SHOWING = {"measured", "plot", "markdown", "json"}  # what --from goes with
Batch = list[list[int]]


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench drafters", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, nargs="+", help=DATA_HELP)
    source.add_argument("--from", type=Path, nargs="+", dest="measured", metavar="FILE",
        help="measure nothing: tables and picture of what earlier runs printed with "
        "--json")  # fmt: skip
    add_choice_options(parser)
    add("--by-file", action="store_true", help="measure each path of --data by itself: its name is "
        "that of a kind of prompts")  # fmt: skip
    add("--run", nargs="+", action="append", metavar=("DRAFTER", "MODE"), help="a drafter and its "
        "modes; may be repeated (default: ngram and the default drafter, each with "
        "chain:5)")  # fmt: skip
    add("--batch", type=number, nargs="+", default=[1], help="batch sizes")
    add("--batches", type=number, default=6, help="batches of each size")
    add("--turns", type=number, default=1, help="times that each run decodes a batch, by "
        "turns; its speed is the median")  # fmt: skip
    add("--prompt-tokens", type=int, default=64, help="tokens of a prompt; the most of "
        "one from a chat, which ends where the first answer begins")  # fmt: skip
    add("--max-tokens", type=int, default=192, help="new tokens of each prompt")
    add("--temperatures", "--temperature", type=float, nargs="+", default=[0.0], help="sampling "
        "temperatures; 0 is greedy")  # fmt: skip
    add("--top-p", type=float, default=1.0, help="probability kept in sampling; 1 keeps all")
    add("--acceptance", choices=("match", "rejection"), default="match", help="acceptance rule")
    add("--verify-width", type=int, help="nodes that every verification is padded to, plain "
        "decoding's too, so that all round alike (default: not padded)")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16"), help="(default: float32 on CPU, else bfloat16)")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--compilation-cache", type=Path, help="folder that compiled programs are stored in, for "
        "the next run")  # fmt: skip
    add("--plot", type=Path, help="write speed-ups and acceptance by depth as a PNG")
    add("--markdown", action="store_true", help="print tables of speeds as Markdown")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A run that takes part.

    Attributes:
      weight_bytes: of the drafter, without what it shares with the target.
      token_bytes: of the drafter's cache, for each token of a context.
    """

    llm: LLM
    drafter: str
    mode: str
    weight_bytes: int
    token_bytes: float

    @property
    def facts(self) -> dict[str, Any]:
        names = ("drafter", "mode", "weight_bytes", "token_bytes")
        return {name: getattr(self, name) for name in names}


def chosen_runs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Plain decoding, then each drafter in each of its modes."""
    runs, chosen = [PLAIN_RUN], args.run or DEFAULT_RUNS
    if args.run is None and choose_drafter(args.model, "auto") == "ngram":
        chosen = DEFAULT_RUNS[:1]  # the default drafter is the other one
    for drafter, *modes in chosen:
        if not modes:
            raise ValueError(
                f"--run {drafter} needs a mode after it: chain:K, NODES:DEPTH:TOPK or default"
            )
        runs += [(drafter, mode) for mode in modes]
    names = {(str(choose_drafter(args.model, drafter)), mode) for drafter, mode in runs}
    if "none" in [drafter for drafter, _ in runs[1:]] or len(names) < len(runs):
        raise ValueError("each --run names another drafter or mode; plain decoding is always there")
    for _, mode in runs:
        speculation_of(args, mode)  # fails now, not after loading
    return runs


def speculation_of(args: argparse.Namespace, mode: str) -> SpeculationConfig | None:
    """What a mode asks for; None: nothing, the engine chooses."""
    asked = {"acceptance": args.acceptance, "verify_width": args.verify_width}
    if mode == "default":
        if asked != {"acceptance": "match", "verify_width": None}:
            raise ValueError("the mode default takes neither --acceptance nor --verify-width")
        return None
    return dataclasses.replace(SpeculationConfig.parse(mode), **asked)


def load_entrants(args: argparse.Namespace, runs: Sequence[tuple[str, str]]) -> Iterator[Entrant]:
    """One after the other; the first one's target is everyone's."""
    tokenizer, target = TextTokenizer(args.model), None
    for drafter, mode in runs:
        llm = make_llm(args, drafter, mode, tokenizer, target)
        target = llm.params.target
        yield Entrant(
            llm,
            str(choose_drafter(args.model, drafter)),
            mode,
            *bytes_of_drafter(llm),
        )


def bytes_of_drafter(llm: LLM) -> tuple[int, float]:
    """Bytes of its weights, and of its cache for each token. A model that drafts text has both in
    its engine."""
    host = llm.engine.host_drafter
    if isinstance(host, TextDrafter) and isinstance(host.source, ModelSource):
        writer = host.source.engine.params
        return local_bytes(writer.target), bytes_of_token(writer)[0]
    return local_bytes(llm.params.drafter), bytes_of_token(llm.params)[1]


def make_llm(
    args: argparse.Namespace,
    drafter: str,
    mode: str,
    tokenizer: TextTokenizer,
    target: Decoder | None,
) -> LLM:
    most = max(args.batch)
    return LLM(
        args.model,
        drafter,
        speculation=speculation_of(args, mode),
        dtype=args.dtype,
        max_length=args.prompt_tokens + args.max_tokens,
        # A batch is read at once: its texts begin together. Without a prefix cache it is read by
        # the same program each time.
        engine=EngineConfig(
            max_rows=most, prefill_budget=most * args.prompt_tokens, prefix_caching=False
        ),
        tokenizer=tokenizer,
        target=target,
    )


def batches_of(prompts: Sequence[list[int]], size: int, count: int) -> list[Batch]:
    """At most ``count`` batches of ``size``, evenly spread over the prompts."""
    chosen = [prompts[row] for row in spread_rows(len(prompts), size * count)]
    return [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]


def prompts_by_kind(args: argparse.Namespace, progress: Console) -> dict[str, list[list[int]]]:
    """The prompts of each kind; without --by-file all are of the kind ``""``."""
    most = max(args.batch) * args.batches
    parts: dict[str, list[Path]] = {"": args.data}
    if args.by_file:
        parts = {path.stem: [path] for path in args.data}
        if len(parts) < len(args.data):
            raise ValueError("--by-file needs paths of different names")
    found = {}
    for kind, paths in parts.items():
        part = argparse.Namespace(**(vars(args) | {"data": paths}))
        prompts, _ = read_prompts(part, most, args.prompt_tokens, args.max_tokens, progress)
        if len(prompts) < max(args.batch):
            raise ValueError(
                f"{len(prompts)} held-out rows are fewer than one batch: give more --data, or more "
                "--prompt-tokens if prompts of chats were too long"
            )
        found[kind] = prompts
    return found


def measure(args: argparse.Namespace, progress: Console) -> Iterator[dict[str, Any]]:
    """One temperature after the other, for each one batch size after the other, and for each of
    these one kind of prompts after the other."""
    runs = chosen_runs(args)
    prompts = prompts_by_kind(args, progress)
    with progress.status("loading"):
        entrants = list(load_entrants(args, runs))
    params = entrants[0].llm.params
    facts = run_facts() | {
        "model": str(args.model),
        "data": list(map(str, args.data)),
        "dtype": str(params.target.embed.dtype),
        "target_weight_bytes": local_bytes(params.target),
        "target_token_bytes": bytes_of_token(params)[0],
        **{name: getattr(args, name) for name in CHOICES},
    }
    for temperature in args.temperatures:
        sampling = SamplingParams(
            temperature=temperature,
            top_p=args.top_p,
            seed=args.seed,
            max_tokens=args.max_tokens,
            stop_token_ids=(),
        )
        for size in args.batch:
            batches = {kind: batches_of(prompts[kind], size, args.batches) for kind in prompts}
            bench = Bench(entrants, sampling, args.turns, progress)
            bench.prepare(batches)
            for kind, of_kind in batches.items():
                yield facts | {"rows": bench.measure(kind, of_kind)}


@dataclasses.dataclass(frozen=True)
class Bench:
    """All runs at one temperature."""

    entrants: Sequence[Entrant]
    sampling: SamplingParams
    turns: int
    progress: Console

    @property
    def engines(self) -> list[LLM]:
        return [entrant.llm for entrant in self.entrants]

    def prepare(self, batches: Mapping[str, Sequence[Batch]]) -> None:
        """Compile what batches of one size run."""
        every = [batch for of_kind in batches.values() for batch in of_kind]
        name, started = self._name(every[0]), time.perf_counter()
        before = programs_of(self.engines)
        with self.progress.status(f"{name}: compiling") as status:
            prepare_race(
                self.engines,
                every,
                self.sampling,
                lambda done, of: status.update(f"{name}: compiled {done} of {of} programs"),
            )
        seconds = time.perf_counter() - started
        made = programs_of(self.engines) - before
        self.progress.print(f"{name}: {made} programs compiled in {seconds:.0f} s")

    def measure(self, kind: str, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """A row for each run."""
        setting = {
            "kind": kind,
            "temperature": self.sampling.temperature,
            "batch": len(batches[0]),
            "turns": self.turns,
        }
        name = " ".join(filter(None, (f"{self._name(batches[0])}:", kind)))
        before, started = programs_of(self.engines), time.perf_counter()
        with self.progress.status(f"{name}: decoding {len(batches)} batches with each run"):
            paces = race(self.engines, batches, self.sampling, self.turns)
        late = programs_of(self.engines) - before
        self.progress.print(
            f"{name}: {len(batches)} batches decoded in {time.perf_counter() - started:.0f} s"
            + (f" (programs compiled meanwhile: {late})" if late else "")
        )
        return [
            setting | entrant.facts | dataclasses.asdict(pace)
            for entrant, pace in zip(self.entrants, paces, strict=True)
        ]

    def _name(self, batch: Batch) -> str:
        return f"temperature {self.sampling.temperature:g}, batch {len(batch)}"


def programs_of(engines: Sequence[LLM]) -> int:
    return sum(llm.engine.programs.compiled for llm in engines)


def run(args: argparse.Namespace) -> None:
    if args.measured is not None:
        option = given_option(make_parser(), args, sorted(vars(args).keys() - SHOWING))
        if option is not None:
            raise ValueError(f"{option} and --from exclude each other: nothing is measured")
    if args.compilation_cache is not None:
        keep_compiled_programs(make_folder(args.compilation_cache))
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
    if args.measured is not None:
        parts: Iterable[dict[str, Any]] = read_parts(args.measured)
    else:
        parts = measure(args, progress_console())
    show(args, parts)


def show(args: argparse.Namespace, parts: Iterable[dict[str, Any]]) -> None:
    kept = []

    def keep(part: dict[str, Any]) -> dict[str, Any]:
        kept.append(part)
        return part

    results = collect_parts(map(keep, parts), "rows", as_json=args.json)
    if args.markdown:
        print(as_markdown(kept), file=sys.stderr if args.json else sys.stdout)
    else:
        tables = make_tables(results)
        console = table_console(stderr=args.json, width=max(map(full_width, tables)))
        for table in tables:
            console.print(table)
    if args.plot is not None:
        plot_drafters(results, args.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
