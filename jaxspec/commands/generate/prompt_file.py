"""What `jaxspec generate --out` does; its options are in __init__.py."""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec import LLM
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.commands.generate.generation import local_program_folder, make_llm, sampling_params
from jaxspec.commands.shared.importing import MissingExtra, import_command
from jaxspec.commands.shared.meshes import engine_meshes
from jaxspec.commands.shared.program_cache import keep_compiled_programs
from jaxspec.commands.shared.several_processes import processes_of
from jaxspec.commands.shared.shell import print_json, progress_console, read_text
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.batch.answers import Answers
from jaxspec.llm.batch.prompt_file import PromptFile, Shard, open_prompts, read_shard
from jaxspec.llm.batch.result_file import ResultFile
from jaxspec.llm.batch.run import Answer, EngineFailed, Tally, run_batch
from jaxspec.llm.progress_bar import request_bar
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.llm.tokenizer import TextTokenizer
from jaxspec.parallel.processes import Processes

# Options that texts depend on. A run may go on with others.
RECORDED = (
    *("model", "drafter", "dtype", "tree", "acceptance", "proposal", "verify_width"),
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "max_length"),
    *("deterministic", "token_ids", "kv_dtype"),
)
OPENAI_FIELDS = {"body", "method", "url"}
IN_FLIGHT = 2  # prompts for each row: one that runs, and one that can begin at once
LINE_SECONDS = 30  # between two lines of progress, where the output is no terminal


@dataclasses.dataclass(frozen=True)
class Job:
    """A part of a file of prompts. ``template``: of chats, instead of the model's own."""

    arguments: argparse.Namespace
    template: str | None
    prompts: PromptFile
    part: range

    def record(self) -> dict[str, Any]:
        """What the results depend on."""
        arguments, template = self.arguments, self.template
        scales = arguments.kv_scales and read_text(arguments.kv_scales)
        return {
            "prompt_file_sha256": self.prompts.digest,
            "part": [self.part.start, self.part.stop],
            **{name: getattr(arguments, name) for name in RECORDED},
            "chat_template_sha256": template and hashlib.sha256(template.encode()).hexdigest(),
            "kv_scales_sha256": scales and hashlib.sha256(scales.encode()).hexdigest(),
        }


def run(arguments: argparse.Namespace) -> None:
    """Raises ValueError for what cannot run, and if the engine fails."""
    shard = read_shard(arguments.shard, os.environ)
    template = arguments.chat_template and read_text(arguments.chat_template)
    sampling_params(arguments)  # a bad value is found before a file is read
    with processes_of(arguments) as processes:
        if processes is not None and not processes.leads:
            for llm in load(arguments, processes):
                llm.follow()
            return
        lead(arguments, shard, template, processes)


def lead(
    arguments: argparse.Namespace, shard: Shard, template: str | None, processes: Processes | None
) -> None:
    """In the process that reads and writes the files."""
    prompts = open_prompts(arguments.prompt_file)
    job = Job(arguments, template, prompts, shard.part(prompts.count))
    began, tally = time.perf_counter(), Tally()
    with ResultFile(shard.path(arguments.out), job.record(), job.part) as results:
        before = results.num_done
        if before < len(job.part):
            generate(job, results, tally, processes)
        results.finish()
    report = {
        "out": str(results.path),
        "prompts": len(job.part),
        "done_before": before,
        "errors": count_errors(results.path),
        "tokens": tally.tokens,
        "seconds": time.perf_counter() - began,
    }
    if arguments.json:
        print_json(report)
    else:
        print(summary(report))


def generate(
    job: Job, results: ResultFile, tally: Tally, processes: Processes | None = None
) -> None:
    """All results that are not there yet."""
    llms = load(job.arguments, processes)
    in_flight = IN_FLIGHT * sum(llm.engine.config.max_rows for llm in llms)
    lines = (line for line in job.prompts.lines(job.part) if not results.has(line[0]))

    async def run_all() -> None:
        engines = [AsyncLLM(llm, on_chunk=tally.observe) for llm in llms]
        async with engines[0] if len(engines) == 1 else ReplicatedLLM(engines) as serving:
            with progress(results, len(job.part), tally) as update:

                def keep(index: int, result: dict[str, Any]) -> None:
                    results.add(index, result)
                    update()

                answer = Lines(job, serving).answer
                await run_batch(lines, answer, keep, tally, in_flight=in_flight)

    try:
        asyncio.run(run_all())
    except EngineFailed as error:
        raise ValueError(f"the engine failed: {error}; the same command goes on") from error


def load(arguments: argparse.Namespace, processes: Processes | None) -> list[LLM]:
    """An engine for each of --dp. Raises ValueError where there are too few devices."""
    keep_compiled_programs(local_program_folder(arguments))
    replicas = 1 if arguments.dp is None else arguments.dp
    meshes = engine_meshes(arguments, replicas)
    model, tokenizer = arguments.model, TextTokenizer(arguments.model)
    with progress_console().status(f"loading {Path(model).name}"):
        return [
            make_llm(arguments, arguments.drafter, tokenizer, mesh, processes) for mesh in meshes
        ]


class Lines:
    """Answers lines of both kinds: the project's own, and OpenAI's."""

    def __init__(self, job: Job, serving: AsyncLLM | ReplicatedLLM):
        self._job, self._serving = job, serving
        sampling = sampling_params(job.arguments)
        self._own = Answers(serving, sampling, job.template, job.arguments.token_ids)

    async def answer(self, index: int, line: Mapping[str, Any]) -> dict[str, Any]:
        if line.keys() & OPENAI_FIELDS:
            return await self._openai(index, line)
        return await self._own.answer(index, line)

    @functools.cached_property
    def _openai(self) -> Answer:
        """Loaded when the first such line comes. Raises MissingExtra without ``serve``."""
        model, seed = self._job.arguments.model, self._job.arguments.seed
        try:
            batch = import_command("jaxspec.serving.batch", "jaxspec generate")
        except MissingExtra as error:
            raise MissingExtra(f"lines of OpenAI's kind: {error}") from error
        names = {resolve_directory(model).name: None, model: None}  # requests may name either
        return batch.batch_lines(self._serving, tuple(names), self._job.template, seed)


@contextlib.contextmanager
def progress(results: ResultFile, total: int, tally: Tally) -> Iterator[Callable[[], None]]:
    """A bar on stderr; where that is no terminal, a line now and then. The function updates it."""
    console = progress_console()
    began = shown = time.perf_counter()

    def show_line() -> None:
        nonlocal shown
        now = time.perf_counter()
        if now - shown >= LINE_SECONDS:
            shown = now
            console.print(f"{results.num_done} of {total}, {tally.speed(now - began)}")

    if not console.is_terminal:
        yield show_line
        return
    with request_bar(total, console, done=results.num_done) as show:
        yield lambda: show(results.num_done, tally.speed)


def count_errors(path: Path) -> int:
    """Results that say why their prompt was not served."""
    with path.open("rb") as file:
        return sum(json.loads(line).get("error") is not None for line in file)


def summary(report: Mapping[str, Any]) -> str:
    text = f"{report['out']}: {report['prompts']} results"
    if report["done_before"] == report["prompts"]:
        return f"{text}, all of them from before"
    if report["done_before"]:
        text += f", {report['done_before']} of them from before"
    if report["errors"]:
        text += f"; {report['errors']} prompts could not be served: see their `error`"
    rate = report["tokens"] / report["seconds"]
    return f"{text}; {report['tokens']} tokens in {report['seconds']:.0f} s ({rate:,.0f} tokens/s)"
