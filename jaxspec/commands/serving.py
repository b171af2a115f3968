"""What the command `jaxspec serve` does; its options are in serve.py."""

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax

from jaxspec import LLM, SpeculationConfig, make_mesh
from jaxspec.async_llm import AsyncLLM
from jaxspec.commands.engine_config import engine_config
from jaxspec.commands.generation import program_folder
from jaxspec.commands.program_cache import keep_compiled_programs
from jaxspec.commands.shell import progress_console
from jaxspec.engine import Engine
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.serving.app import make_app
from jaxspec.serving.lifecycle import serve
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.rates import Rates
from jaxspec.serving.service import Service
from jaxspec.structured import StructuredOutput
from jaxspec.weights.hub import resolve_directory

SAMPLED = SamplingParams(temperature=1.0)
EVERYTHING = (
    SamplingParams(),
    SAMPLED,
    dataclasses.replace(SAMPLED, logprobs=1),
    dataclasses.replace(SAMPLED, logprobs=1, presence_penalty=0.5),
    dataclasses.replace(SAMPLED, structured=StructuredOutput(json_object=True)),
)


def make_llm(arguments: argparse.Namespace) -> LLM:
    """Raises ValueError for options that do not go together, and files that cannot be read."""
    tree = arguments.tree
    llm = LLM(
        arguments.model,
        arguments.drafter,
        speculation=None if tree is None else SpeculationConfig.parse(tree),
        dtype=arguments.dtype,
        mesh=make_mesh(arguments.tp) if arguments.tp != 1 else None,
        kernels=arguments.kernels,
        page_size=arguments.page_size,
        max_length=arguments.max_length,
        kv_memory=arguments.kv_memory,
        engine=dataclasses.replace(
            engine_config(arguments, arguments.max_rows, plain=False),
            max_queue=arguments.max_queue,
            rounds_per_call=arguments.rounds_per_call,
            prefill_budget=arguments.prefill_budget,
            trees=not arguments.no_trees,
        ),
    )
    _ = llm.tokenizer, llm.grammars if llm.params.target.config.stop_token_ids else None
    return llm


def warm_up(engine: Engine, what: str, show: Callable[[str], None]) -> None:
    """Compile programs before the first request comes."""
    if what == "full":
        engine.warm_up(
            EVERYTHING, on_progress=lambda done, count: show(f"compiling program {done} of {count}")
        )
    if what == "quick":
        for rows in sorted({1, engine.config.max_rows}):
            show(f"compiling for {rows} rows")
            engine.prepare(rows, 8, dataclasses.replace(SAMPLED, max_tokens=8))


def read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def run(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together, and files that cannot be read."""
    keep_compiled_programs(program_folder(arguments))
    directory = resolve_directory(arguments.model)  # a bad name is found at once
    is_local = Path(arguments.model).exists()
    name = arguments.served_model_name or (directory.name if is_local else arguments.model)
    service = Service(
        names=(name,),
        chat_template=read_template(arguments.chat_template),
        tool_format=arguments.tool_format,
        request_timeout=arguments.request_timeout,
        max_new_tokens=arguments.max_tokens_per_request,
    )
    metrics = Metrics(name)
    try:
        asyncio.run(_serve(arguments, service, metrics))
    finally:
        metrics.close()


async def _serve(arguments: argparse.Namespace, service: Service, metrics: Metrics) -> None:
    console = progress_console()
    own = os.environ.get("JAXSPEC_API_KEY")
    keys = arguments.api_key or ([own] if own else [])
    app = make_app(
        service,
        metrics,
        api_keys=keys,
        max_body=arguments.max_body,
        body_seconds=arguments.body_timeout,
        rates=Rates(arguments.requests_per_minute, arguments.tokens_per_minute),
        cors_origins=arguments.cors_origin,
    )
    with console.status("starting") as status:

        def show(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        def load() -> AsyncLLM:
            show(f"loading {service.name}")
            llm = make_llm(arguments)
            warm_up(llm.engine, arguments.warm_up, show)
            metrics.watch(llm.engine)
            return AsyncLLM(llm, on_chunk=metrics.observe)

        def ready(address: str) -> None:
            status.stop()
            rows = f"{arguments.max_rows} rows on {jax.devices()[0].device_kind}"
            console.print(f"serving {service.name} ({rows}) at {address}/v1")

        await serve(
            app,
            service,
            load,
            host=arguments.host,
            port=arguments.port,
            drain_seconds=arguments.drain_seconds,
            on_ready=ready,
        )
