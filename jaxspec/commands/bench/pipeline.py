"""Time one model shape on one device, by tensor parallelism, and as pipelines, in one run.

Arrangements: `1` one device; `tpN` tensor parallel; `ppN` a pipeline of N stages; `ppNxM` one whose
stages have M devices each; `draft` and `draftN` the target on N devices, drafter, embeddings and LM
head on one more. Requests begin together, with random prompts, on random weights and at a synthetic
acceptance length. A stage's idle share is what is left of a round when every stage's own programs,
timed one by one, are subtracted; "steps" is that share by the schedule alone, and "fill" is
(S - 1) / (M + S - 1), that of rounds which wait for each other.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.commands.shared.option_types import number, numbers
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    JSON_PARTS,
    add_rows,
    command_parser,
    device_line,
    left_table,
    progress_console,
    run_command,
    show_parts,
)
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import DraftModelDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.pipeline.programs import PipelinePrograms
from jaxspec.engine.programs.sizes import Kind, Load
from jaxspec.evaluation.benchmarks.modes import Mode, make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head, random_pipeline
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.models.pipeline_cut import check_layers, chosen_layers
from jaxspec.parallel import make_mesh, stage_meshes
from jaxspec.parallel.bytes import local_bytes
from pallas_kernels.selection import Kernels

ARRANGEMENT = re.compile(r"1|tp(\d+)|pp(\d+)(?:x(\d+))?|draft(\d*)")
MEASURED, ROUNDS = 3, 8  # times, and rounds, of each stage alone; the fastest time counts
# The table's columns, and what their cells show of a timing.
COLUMNS = {
    "devices": "{arrangement}",
    "layers": "{layers}",
    "requests": "{batch}",
    "prefill ms": "{prefill_ms:.1f}",
    "ms/round": "{round_ms:.3f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "stages ms": "{stage_ms:.2f}",
    "idle %": "{idle:.0%}",
    "steps %": "{steps_idle:.0%}",
    "fill %": "{fill:.0%}",
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench pipeline", __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-3.1-8b", help="shape of the model")
    add("--arrangements", default="1,tp2,pp2,draft", help="separated by commas")
    add("--mode", default="chain:5@3.5", help="plain, or a tree as in bench engine")
    add("--draft-shape", choices=SHAPES, help="shape of a draft model; its vocabulary is the "
        "target's (default: a head)")  # fmt: skip
    add("--stage-layers", type=numbers, metavar="L,L,..", help="layers of each stage of ppN")
    add("--batch", type=numbers, default=(2, 8, 32), help="numbers of requests, separated by "
        "commas")  # fmt: skip
    add("--context", type=number, default=512, help="prompt tokens of each")
    add("--new-tokens", type=number, default=256, help="new tokens of each")
    add("--repeats", type=number, default=3, help="runs; the fastest is reported")
    add("--page-size", type=number, default=64, help="tokens of a page of the KV cache")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and cache")
    add("--kernels", default="auto", help="auto (all on a Hopper GPU), all, none or a comma list")
    add("--json", action="store_true", help=JSON_PARTS)
    return parser


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Devices of a model.

    Attributes:
      separate_drafter: drafter, embeddings and LM head have another device, after those of the
        target.
    """

    name: str
    tp: int = 1
    pp: int = 1
    separate_drafter: bool = False

    @classmethod
    def parse(cls, text: str) -> "Arrangement":
        """Raises ValueError for anything but what the command's help says."""
        found = ARRANGEMENT.fullmatch(text)
        if found is None:
            raise ValueError(f"arrangement {text!r} must be 1, tpN, ppN, ppNxM, draft or draftN")
        tp, pp, each, target = found.groups()
        if target is not None:
            return cls(text, tp=int(target or 1), separate_drafter=True)
        return cls(text, tp=int(tp or each or 1), pp=int(pp or 1))

    def meshes(self) -> tuple[Any, ...]:
        """The mesh of each stage; None: the default device.

        Raises ValueError for too few devices.
        """
        if self.separate_drafter:
            devices = jax.devices()[self.tp : self.tp + 1]
            if not devices:
                raise ValueError(f"arrangement {self.name} needs {self.tp + 1} devices")
            return stage_meshes(make_mesh(self.tp), make_mesh(devices=devices))
        if (self.tp, self.pp) == (1, 1):
            return (None,)
        return stage_meshes(make_mesh(self.tp, pipeline_parallel=self.pp))


def random_params(args: argparse.Namespace, arrangement: Arrangement, mode: Mode) -> EngineParams:
    """Raises ValueError for layers that are no split of the model."""
    config, dtype, meshes = SHAPES[args.shape], jnp.dtype(args.dtype), arrangement.meshes()
    kernels = Kernels.parse(args.kernels, sharing=arrangement.tp)
    draft = head = None
    if args.draft_shape is not None:
        draft_config = dataclasses.replace(SHAPES[args.draft_shape], vocab_size=config.vocab_size)
        draft = random_decoder(draft_config, dtype, meshes[-1], seed=1)
    elif mode.speculation is not None:
        head = random_head(config, dtype, meshes[-1], seed=1)
    if len(meshes) == 1:
        stages, target = (), random_decoder(config, dtype, meshes[0], seed=0)
    else:
        depth = 0 if mode.speculation is None else mode.speculation.max_depth
        layers = args.stage_layers
        if layers is None or arrangement.separate_drafter:
            drafted = depth * local_bytes((draft, head))
            layers = chosen_layers(
                config, dtype, meshes, drafted, drafter_has_devices=arrangement.separate_drafter
            )
        check_layers(layers, config, len(meshes))
        stages, target = random_pipeline(config, dtype, meshes, layers, seed=0)
    if draft is None:
        params = make_params(mode, target, head, meshes[-1], kernels)
    else:
        params = make_params(parse_mode("plain"), target, None, meshes[-1], kernels)
        assert mode.speculation is not None
        params = params.replace(
            drafter=DraftModelDrafter(model=draft), speculation=mode.speculation
        )
    return params.replace(stages=stages)


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    mode = parse_mode(args.mode)
    arrangements = [Arrangement.parse(text) for text in args.arrangements.split(",")]
    if args.draft_shape is not None and mode.speculation is None:
        raise ValueError("--draft-shape needs a mode that drafts")
    for arrangement in arrangements:
        arrangement.meshes()  # before anything is made
    for arrangement in arrangements:
        console.print(f"{arrangement.name}: making random weights")
        params = random_params(args, arrangement, mode)
        for batch in args.batch:
            console.print(f"{arrangement.name}, {batch} requests: compiling")
            row = time_requests(args, params, batch)
            console.print(f"{arrangement.name}, {batch} requests: {row['round_ms']:.3f} ms a round")
            timing = {"arrangement": arrangement.name, "batch": batch, **row}
            yield {**run_facts(), "arguments": vars(args), "timings": [timing]}
        del params  # its memory is for the next one


def time_requests(args: argparse.Namespace, params: EngineParams, batch: int) -> dict[str, Any]:
    """Requests that begin together, in an engine of so many rows."""
    config, length = params.target.config, args.context + args.new_tokens
    cache = CacheConfig(page_size=args.page_size, max_length=length)
    settings = EngineConfig(
        max_rows=batch, prefill_budget=batch * args.context, prefix_caching=False
    )
    engine = Engine(params, cache, settings)
    shape = batch, args.context
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=shape).tolist()
    sampling = [SamplingParams(max_tokens=args.new_tokens)] * batch
    runs = []
    for _ in range(1 + args.repeats):  # the first one compiles
        generations = engine.add_all(prompts, sampling)
        started = time.perf_counter()
        while not all(request.token_ids for request in generations):
            engine.step()
        read, rounds = time.perf_counter(), most_rounds(generations)
        engine.finish(generations)
        seconds = time.perf_counter() - read
        if any(request.error for request in generations):
            raise RuntimeError(f"a request failed: {generations[0].error}")
        rounds = most_rounds(generations) - rounds
        tokens = sum(len(request.token_ids) for request in generations)
        runs.append((seconds / rounds, read - started, tokens / (read - started + seconds)))
    round_seconds, read_seconds, rate = min(runs[1:])
    programs, stages, busy = engine.programs, None, None
    if isinstance(programs, PipelinePrograms):
        stages, busy = measured_stages(engine, programs, prompts, sampling), programs.pipeline
    groups = 1 if stages is None else min(batch, len(stages))
    return {
        "round_ms": 1e3 * round_seconds,
        "prefill_ms": 1e3 * read_seconds,
        "tokens_per_second": rate,
        "stage_ms": None if stages is None else [1e3 * seconds for seconds in stages],
        "layers": [*(len(stage.layers) for stage in params.stages), len(params.target.layers)],
        "idle": None
        if stages is None
        else 1 - groups * sum(stages) / (len(stages) * round_seconds),
        "steps_idle": None if busy is None else busy.bubble,
        "fill": None if stages is None else (len(stages) - 1) / (groups + len(stages) - 1),
    }


def most_rounds(generations: Sequence[Generation]) -> int:
    return max(request.statistics.rounds for request in generations)


def measured_stages(
    engine: Engine,
    programs: PipelinePrograms,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
) -> list[float]:
    """Seconds of each stage for a round of one group, the fastest of a few."""
    generations = engine.add_all(prompts, sampling)
    while not all(request.token_ids for request in generations):
        engine.step(1)
    jax.block_until_ready(programs.state)
    rows, shape = range(len(prompts)), programs.params.round_options().speculation.shape
    tokens = len(prompts[0]) + int(sampling[0].max_tokens)
    key = programs.rounds_key(rows, tokens, Load(), shape, Kind.GREEDY, rounds=1)
    timed = [programs.stage_seconds(key, rows, ROUNDS) for _ in range(MEASURED)]
    for request in generations:
        engine.cancel(request)
    return [min(times) for times in zip(*timed, strict=True)]


def make_tables(results: dict[str, Any]) -> list[Table]:
    arguments = results["arguments"]
    drafts = f", drafted by {arguments['draft_shape']}" if arguments["draft_shape"] else ""
    title = (
        f"{arguments['shape']}, {arguments['dtype']}, {arguments['mode']}{drafts}, "
        f"{device_line(results)}"
    )
    table = left_table(title, results["command"], right=COLUMNS)
    add_rows(table, COLUMNS.values(), results["timings"])
    return [table]


def run(args: argparse.Namespace) -> None:
    parts = measure(args, progress_console())
    show_parts(parts, "timings", make_tables, as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
