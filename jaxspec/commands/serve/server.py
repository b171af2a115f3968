"""What the command `jaxspec serve` does; its options are in __init__.py."""

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxspec import LLM
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.commands.generate.generation import local_program_folder
from jaxspec.commands.serve.start_up import StartUp
from jaxspec.commands.shared.collector import without_collector
from jaxspec.commands.shared.engine_config import engine_config, llm_options, with_memory
from jaxspec.commands.shared.importing import STARTED, import_command
from jaxspec.commands.shared.meshes import engine_meshes
from jaxspec.commands.shared.program_cache import keep_compiled_programs
from jaxspec.commands.shared.several_processes import processes_of
from jaxspec.commands.shared.shell import progress_console, read_text
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.compiled import logger as programs_logger
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from jaxspec.engine.warm_up.compile_early import compiling_threads
from jaxspec.engine.warm_up.compile_general import GeneralPrograms
from jaxspec.engine.warm_up.short_requests import PROMPT_TOKENS, SHORT, begin_short_requests
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.llm.request_length import length_text
from jaxspec.llm.tokenizer.text import TextTokenizer
from jaxspec.parallel.processes import Processes
from jaxspec.serving.app import AppOptions, make_app
from jaxspec.serving.background import warm_in_background
from jaxspec.serving.endpoint import Endpoint
from jaxspec.serving.generation_config import FILE, as_text, sampling_defaults
from jaxspec.serving.lifecycle import end_if_loading, serve
from jaxspec.serving.messages import check_variables
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.rates import Rates
from jaxspec.serving.request_ids import logger as access_logger
from jaxspec.serving.responses.store import ResponseStore
from jaxspec.serving.service import Service
from jaxspec.serving.template_trial import ToolUse
from jaxspec.serving.tracing import Spans

SAMPLED = SamplingParams(temperature=1.0)
EVERYTHING = (
    SamplingParams(),
    SAMPLED,
    dataclasses.replace(SAMPLED, logprobs=1),
    dataclasses.replace(SAMPLED, logprobs=1, presence_penalty=0.5),
    dataclasses.replace(SAMPLED, structured=StructuredOutput(json_object=True)),
)


def make_llm(
    arguments: argparse.Namespace,
    mesh: Mesh | None,
    tokenizer: TextTokenizer,
    processes: Processes | None = None,
) -> LLM:
    """Raises ValueError for options that do not go together, and files that cannot be read."""
    engine = dataclasses.replace(
        with_memory(engine_config(arguments, arguments.max_rows, plain=False), arguments),
        max_queue=arguments.max_queue,
        rounds_per_call=arguments.rounds_per_call,
        prefill_budget=arguments.prefill_budget,
        max_programs=arguments.max_programs,
        trees=not arguments.no_trees,
    )
    options = dataclasses.replace(
        llm_options(arguments, mesh),
        max_length=arguments.max_length or "model",
        kv_memory=arguments.kv_memory,
        tokenizer=tokenizer,
        engine=engine,
        processes=processes,
    )
    llm = LLM.from_options(options)
    _ = llm.tokenizer, llm.grammars if llm.params.target.config.stop_token_ids else None
    return llm


def warm_up(engine: Engine, what: str, show: Callable[[str], None]) -> None:
    """Compile programs before the first request comes."""
    if what == "full":
        engine.warm_up(
            EVERYTHING, on_progress=lambda done, count: show(f"compiling program {done} of {count}")
        )
    most, pool = engine.config.max_rows, compiling_threads()
    if what in ("quick", "background"):
        begin_short_requests(engine, most, pool)
    general = GeneralPrograms(engine, pool) if what == "background" else None
    pool.shutdown(wait=False)
    if what in ("quick", "background"):
        for rows in sorted({1, most}):
            show(f"compiling for {rows} rows")
            compile_by_running(engine, rows, PROMPT_TOKENS, SHORT)
    if general is not None:
        show("compiling for requests of any kind")
        general.finish()
        engine.programs.sealed = True


def load_engines(
    arguments: argparse.Namespace,
    name: str,
    meshes: Sequence[Mesh | None],
    metrics: Metrics,
    show: Callable[[str], None],
    processes: Processes | None,
    start_up: StartUp,
) -> AsyncLLM | ReplicatedLLM:
    """An engine on each mesh. Later ones find the programs that the first has compiled, on GPUs."""
    tokenizer, engines = TextTokenizer(arguments.model), []
    for mesh, member in zip(meshes, metrics.members, strict=True):
        which = f"engine {len(engines) + 1} of {len(meshes)}: " if len(meshes) > 1 else ""
        show(f"{which}loading {name}")
        with start_up.part("loading"):
            llm = make_llm(arguments, mesh, tokenizer, processes)
        with start_up.part("compiling"), start_up.counting_stored_programs():
            warm_up(llm.engine, arguments.warm_up, lambda text, which=which: show(which + text))
        member.watch(llm.engine)
        beside = arguments.warm_up == "background"
        engines.append(AsyncLLM(llm, on_chunk=member.observe, holds_back=beside))
    return engines[0] if len(engines) == 1 else ReplicatedLLM(engines)


def read_template(path: Path | None) -> str | None:
    return None if path is None else read_text(path)


def template_variables(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError for what is no variable of a chat template."""
    try:
        check_variables(arguments.default_chat_template_kwargs)
    except ValueError as error:
        raise ValueError(f"--default-chat-template-kwargs {error}") from error
    return arguments.default_chat_template_kwargs


def show_lines(logger: logging.Logger) -> None:
    """Print what is logged: requests, or compiled programs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    """Raises ValueError for a certificate that cannot be used, and a bad prefix."""
    return Endpoint(
        arguments.host,
        arguments.port,
        path=arguments.uds,
        certificate=arguments.ssl_certfile,
        key=arguments.ssl_keyfile,
        root_path=arguments.root_path,
    )


def spans_of(arguments: argparse.Namespace) -> Spans:
    """Where spans of requests go. Raises MissingExtra without the packages for that."""
    if arguments.otlp_traces_endpoint is None:
        return Spans()
    otel = import_command("jaxspec.serving.otel", "jaxspec serve")
    return otel.spans_to(arguments.otlp_traces_endpoint)


def run(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together, and files that cannot be read."""
    start_up = StartUp(STARTED)
    keep_compiled_programs(local_program_folder(arguments))
    with processes_of(arguments) as processes:
        if processes is None or processes.leads:
            lead(arguments, processes, start_up)
            return
        [mesh] = engine_meshes(arguments)
        make_llm(arguments, mesh, TextTokenizer(arguments.model), processes).follow()


def lead(arguments: argparse.Namespace, processes: Processes | None, start_up: StartUp) -> None:
    """In the process that clients ask."""
    directory = resolve_directory(arguments.model)  # a bad name is found at once
    is_local = Path(arguments.model).exists()
    own_name = directory.name if is_local else arguments.model
    names = tuple(dict.fromkeys(arguments.served_model_name or (own_name,)))
    endpoint = endpoint_of(arguments)
    defaults = sampling_defaults(directory) if arguments.generation_config == "auto" else {}
    service = Service(
        names=names,
        chat_template=read_template(arguments.chat_template),
        tool_format=arguments.tool_format,
        reasoning_format=arguments.reasoning_format,
        json_whitespace=arguments.json_whitespace == "bounded",
        template_variables=template_variables(arguments),
        request_timeout=arguments.request_timeout,
        max_new_tokens=arguments.max_tokens_per_request,
        sampling_defaults=defaults,
    )
    meshes = engine_meshes(arguments, arguments.dp)
    metrics = Metrics(service.name)
    for _ in meshes[1:]:
        metrics.beside()
    try:
        asyncio.run(_serve(arguments, endpoint, meshes, service, metrics, processes, start_up))
    finally:
        for member in metrics.members:
            member.close()
    end_if_loading()


async def _serve(
    arguments: argparse.Namespace,
    endpoint: Endpoint,
    meshes: Sequence[Mesh | None],
    service: Service,
    metrics: Metrics,
    processes: Processes | None,
    start_up: StartUp,
) -> None:
    console, spans = progress_console(), spans_of(arguments)
    app = make_app(service, metrics, app_options(arguments, spans))
    if arguments.access_log:
        show_lines(access_logger)
    show_lines(programs_logger)
    with console.status("starting") as status:

        def show(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        def load() -> AsyncLLM | ReplicatedLLM:
            named = service.name, meshes, metrics
            with without_collector():
                return load_engines(arguments, *named, show, processes, start_up)

        def ready(address: str) -> None:
            gc.freeze()  # it all stays: to look through it would stop the streams for 0.2 s
            status.stop()
            tell_of_service(arguments, service, len(meshes), address, console)
            console.print(start_up.line())
            background.append(asyncio.create_task(tell_of_tools(service, console)))
            if arguments.warm_up == "background":
                rest = (compile_rest(llm, service, console) for llm in service.llm.replicas)
                background.extend(map(asyncio.create_task, rest))

        background: list[asyncio.Task[None]] = []
        try:
            await serve(
                app,
                service,
                load,
                endpoint=endpoint,
                drain_seconds=arguments.drain_seconds,
                on_ready=ready,
            )
        finally:
            await asyncio.gather(*background)
            await asyncio.to_thread(spans.close)


def app_options(arguments: argparse.Namespace, spans: Spans) -> AppOptions:
    default_key = os.environ.get("JAXSPEC_API_KEY")
    return AppOptions(
        api_keys=arguments.api_key or ([default_key] if default_key else []),
        max_body=arguments.max_body,
        body_seconds=arguments.body_timeout,
        rates=Rates(arguments.requests_per_minute, arguments.tokens_per_minute),
        cors_origins=arguments.cors_origin,
        access_log=arguments.access_log,
        spans=spans,
        store=ResponseStore(arguments.max_stored_responses, arguments.max_stored_bytes),
        admin_key=arguments.admin_key or os.environ.get("JAXSPEC_ADMIN_KEY"),
    )


def tell_of_service(
    arguments: argparse.Namespace, service: Service, engines: int, address: str, console: Console
) -> None:
    """Prints what is served, where, and how requests are sampled."""
    several = f"{engines} engines of " if engines > 1 else ""
    rows = f"{several}{arguments.max_rows} rows on {jax.devices()[0].device_kind}"
    console.print(f"serving {service.name} ({rows}) at {address}/v1")
    config = service.llm.llm.params.target.config
    console.print(length_text(arguments.max_length, service.max_length, config))
    if service.sampling_defaults:
        text = as_text(service.sampling_defaults)
        console.print(f"requests are sampled with {text}, as {FILE} says, unless they ask")


async def tell_of_tools(service: Service, console: Console) -> None:
    """Prints why requests with tools are refused, if they are."""

    def use() -> ToolUse | None:
        try:
            return None if service.template() is None else service.tool_use
        except ValueError:  # there is no tokenizer
            return None

    found = await asyncio.to_thread(use)
    if found is not None and not found.shown:
        console.print(
            "requests with tools are refused: the chat template does not show them to the model; "
            "see --chat-template"
        )
    elif found is not None and not (service.tool_format or found.form):
        console.print(
            "requests with tools are refused: the chat template writes calls in a format that is "
            "not known; see --tool-format"
        )


async def compile_rest(llm: AsyncLLM, service: Service, console: Console) -> None:
    """Compiles the programs that are left while the server serves, and says how that ended."""
    try:
        if await warm_in_background(llm, lambda: service.state == "ready", service.warm_up):
            console.print("all programs are ready")
    except RuntimeError as error:
        if service.state == "ready":  # else its engine was closed
            console.print(f"no more programs are compiled ahead: {error}")
