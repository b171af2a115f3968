"""Serve a model over HTTP, as OpenAI's API does.

Without arguments, the built-in model is served at http://127.0.0.1:8000/v1.
"""

# The options alone; the work is in server.py.

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.commands.shared.engine_options import (
    AUTO_DRAFTER_HELP,
    DTYPE_HELP,
    KERNELS_HELP,
    add_kv_options,
    add_memory_options,
    add_mode_options,
    add_pipeline_options,
    add_process_options,
    add_program_options,
    add_sequence_parallel_option,
    add_tensor_parallel_option,
    add_tree_options,
    check_program_options,
)
from jaxspec.commands.shared.importing import import_command
from jaxspec.commands.shared.option_types import number, positive, whole_number
from jaxspec.commands.shared.shell import (
    add_model_option,
    command_parser,
    given_option,
    run_command,
)
from jaxspec.config.engine import EngineConfig
from jaxspec.serving.tool_formats.table import FORMATS as TOOL_FORMATS

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

REASONING_FORMATS = (
    *("think", "think_response", "think_answer", "harmony", "mistral", "seed", "hy3", "kimi"),
    *("granite", "mm_think", "none"),
)


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("serve", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--served-model-name", nargs="+", metavar="NAME", help="the model's name, and further ones "
        "that clients may call it by (default: --model's)")  # fmt: skip
    add("--drafter", default="auto", help=AUTO_DRAFTER_HELP)
    add("--dtype", choices=("float32", "bfloat16"), help=DTYPE_HELP)
    add_kv_options(parser)
    add_tensor_parallel_option(parser)
    add_sequence_parallel_option(parser)
    add_pipeline_options(parser)
    add("--dp", type=int, default=1, metavar="N", help="engines side by side, each with the model "
        "on --tp x --sp devices of its own; a request goes to the one that knows its beginning, "
        "or has the least to do (data parallel)")  # fmt: skip
    add("--kernels", default="auto", help=KERNELS_HELP)
    add_http_options(parser)
    add_chat_options(parser)
    add_capacity_options(parser)
    add_mode_options(parser)
    add_tree_options(parser)
    add_memory_options(parser)
    add_process_options(parser)
    return parser


def add_http_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all of this machine")
    add("--port", type=int, default=8000, help="port to listen at; 0 takes a free one")
    add("--uds", type=Path, metavar="PATH", help="Unix socket to listen at, in place of --host and "
        "--port")  # fmt: skip
    add("--ssl-certfile", type=Path, metavar="FILE", help="certificate (PEM) to serve https with")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its key (default: in --ssl-certfile)")
    add("--root-path", default="", metavar="PATH", help="prefix that a proxy puts before all "
        "paths, such as /llm (default: none)")  # fmt: skip
    add("--access-log", action="store_true", help="a line for each request, with its id, which "
        "answers have as X-Request-Id, too")  # fmt: skip
    add("--otlp-traces-endpoint", metavar="URL", help="collector of spans, such as "
        "http://localhost:4318/v1/traces, which gets that of each request; needs the extra otel "
        "(default: none)")  # fmt: skip
    add("--api-key", action="append", default=[], metavar="KEY", help="key that clients must give; "
        "may be repeated (default: $JAXSPEC_API_KEY, else none is needed)")  # fmt: skip
    add("--admin-key", metavar="KEY", help="key for pausing the server and giving it other weights "
        "(default: $JAXSPEC_ADMIN_KEY, else nobody may)")  # fmt: skip
    add("--max-body", type=size, default=size("8MiB"), help="largest request (default: 8MiB)")
    add("--body-timeout", type=positive, default=60.0, metavar="SECONDS", help="until all of a "
        "request must have come (default: 60)")  # fmt: skip
    add("--request-timeout", type=positive, metavar="SECONDS", help="after which a request ends "
        "(default: never)")  # fmt: skip
    add("--requests-per-minute", type=number, metavar="N", help="requests of each API key, "
        "or, where there are none, of each address; beyond them clients get status 429 (default: "
        "no limit)")  # fmt: skip
    add("--tokens-per-minute", type=number, metavar="N", help="tokens of each API key or "
        "address, read and generated; beyond them, too, clients get status 429 (default: no "
        "limit)")  # fmt: skip
    add("--max-tokens-per-request", type=number, metavar="N", help="most tokens that one text may "
        "have (default: all that fit)")  # fmt: skip
    add("--max-stored-responses", type=whole_number, default=10_000, metavar="N", help="responses "
        "of /v1/responses that are kept for each API key, the last by their use; 0 keeps none "
        "(default: 10000)")  # fmt: skip
    add("--max-stored-bytes", type=size, default=size("256MiB"), metavar="SIZE", help="of them, "
        "for each API key (default: 256MiB)")  # fmt: skip
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help="another origin whose "
        "pages may ask this server, such as https://example.org, or *; may be repeated (default: "
        "none)")  # fmt: skip
    add("--drain-seconds", type=whole_number, default=30, metavar="SECONDS", help="that requests "
        "have to end after SIGTERM; a second before the limit they are cut, a second SIGTERM cuts "
        "them at once (default: 30)")  # fmt: skip


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("texts").add_argument
    add("--generation-config", choices=("auto", "none"), default="auto", help="where requests do "
        "not say how to sample: as the model's generation_config.json says (auto), or as OpenAI's "
        "API has it, temperature 1 (none)")  # fmt: skip
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template (default: the model's)")
    add("--tool-format", choices=tuple(TOOL_FORMATS), help="how the model writes calls of tools "
        "(default: as its chat template tells)")  # fmt: skip
    add("--reasoning-format", choices=REASONING_FORMATS, help="what stands around the model's "
        "reasoning; none: it is content (default: as its chat template tells)")  # fmt: skip
    add("--json-whitespace", choices=("bounded", "none"), default="bounded", help="what may stand "
        "between the tokens of answers and arguments that must be JSON: a space, or a line break "
        "and at most 40 spaces (bounded), or nothing (none)")  # fmt: skip
    add("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}', for requests "
        "that do not set them (default: none)")  # fmt: skip


def add_capacity_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("capacity")
    add = group.add_argument
    add("--max-rows", type=int, default=32, help="requests that run together, in each engine")
    add("--max-queue", type=int, default=1024, help="requests that may wait, in each engine; "
        "beyond them clients get status 429")  # fmt: skip
    add("--max-length", type=number, metavar="N", help="most tokens of a request, its prompt "
        "included (default: what the model allows, if it fits; on CPUs at most 2048)")  # fmt: skip
    add("--kv-memory", type=size, metavar="BYTES", help="of each KV cache, such as 2GiB "
        "(default: as the rows need, or as fit)")  # fmt: skip
    add("--page-size", type=int, default=16, help="tokens of a page of the KV cache")
    add("--rounds-per-call", type=int, default=8, help="most rounds between two looks at results")
    add("--prefill-budget", type=number, help="most prompt tokens between two calls (default: "
        "2048, or what is read in a second, if that is less)")  # fmt: skip
    add("--max-programs", type=int, default=EngineConfig.max_programs, help="compiled programs "
        "that are kept")  # fmt: skip
    add("--no-trees", action="store_true", help="emit no draft trees, which return_speculation and "
        "the page show; it saves a little time")  # fmt: skip
    add("--warm-up", choices=("none", "quick", "background", "full"), default="background",
        help="what is compiled before the first request: nothing (none), two sizes of short "
        "requests (quick), these, and then the rest while no request runs (background), or all "
        "sizes of all that requests may ask (full)")  # fmt: skip
    add_program_options(group)


def size(text: str) -> int:
    """An option's value: bytes, such as 2GiB, 500MB or 1000000."""
    number = text.strip().upper().removesuffix("B")
    unit = number.lstrip("0123456789.").strip()
    try:
        value = float(number.removesuffix(unit)) * UNITS[unit]
    except (KeyError, ValueError):
        value = 0
    if not 1 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be a size such as 2GiB or 500MB, got {text!r}")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    """The value of an option that is a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return found


def run(arguments: argparse.Namespace) -> None:
    check_program_options(arguments)
    option = given_option(make_parser(), arguments, ["host", "port"])
    if arguments.uds is not None and option is not None:
        raise ValueError(f"--uds and {option} exclude each other")
    import_command("jaxspec.commands.serve.server", "jaxspec serve").run(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
