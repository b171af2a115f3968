"""The grammar that a text which may call tools must match."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.engine.structured.json_schema import guided_text, read_schema
from jaxspec.engine.structured.lark import BLANK_LINE
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest, Function, NamedTool, Tool
from jaxspec.serving.tools import ToolFormat

MOST_CHARACTERS = 100_000  # of the tools together
MOST_SECONDS = 1.0  # of CPU time to find those whose schemas do not compile

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING: Mapping[str, Any] = {"type": "object"}
# What says which arguments there may be beside those that are listed.
FURTHER = frozenset(
    {
        *("$ref", "additionalProperties", "allOf", "anyOf", "if", "minProperties", "oneOf"),
        *("patternProperties", "propertyNames", "required", "unevaluatedProperties"),
    }
)


def is_free(request: ChatRequest) -> bool:
    """Whether the text of a request with tools may be without a call."""
    return request.tool_choice in (None, "auto")


def tool_grammar(
    request: ChatRequest, tools: Sequence[Tool], form: ToolFormat, grammars: GrammarCompiler
) -> StructuredOutput:
    """What a text that may call these tools must look like. It is compiled, for the engine.

    Arguments match the tool's schema. Of a tool that is not ``strict``, what cannot be enforced is
    left out, and a schema that does not compile allows any object.

    Raises FieldError, which names the tool, for a ``strict`` one whose schema cannot be enforced,
    and for tools that are too large.
    """
    names, functions = _names(request, tools), [tool.function for tool in tools]
    schemas = _schemas(names, functions)
    grammar = _grammar(request, functions, schemas, form, grammars)
    if not _refusal(grammar, grammars):
        return grammar
    started = time.thread_time()
    for index, (name, function) in enumerate(zip(names, functions, strict=True)):
        schemas[index] = _compilable(name, function, schemas[index], grammars)
        if time.thread_time() - started > MOST_SECONDS:
            raise FieldError("tools", "the tools take too long to compile: make them smaller")
    grammar = _grammar(request, functions, schemas, form, grammars)
    if message := _refusal(grammar, grammars):
        raise FieldError("tools", f"tools: {message}")
    return grammar


def known_tool_grammar(
    request: ChatRequest, tools: Sequence[Tool], form: ToolFormat, grammars: GrammarCompiler
) -> StructuredOutput | None:
    """The result of tool_grammar if that is compiled already, None if it takes time. Raises
    FieldError."""
    functions = [tool.function for tool in tools]
    schemas = _schemas(_names(request, tools), functions)
    grammar = _grammar(request, functions, schemas, form, grammars)
    is_ready = grammars.is_known(grammar) and not _refusal(grammar, grammars)
    return grammar if is_ready else None


def _names(request: ChatRequest, tools: Sequence[Tool]) -> list[str]:
    """The fields of the tools' schemas in the request."""
    return [f"tools.{(request.tools or []).index(tool)}.function.parameters" for tool in tools]


def _schemas(names: Sequence[str], functions: Sequence[Function]) -> list[Mapping[str, Any]]:
    """The schemas of the arguments of tools, of what can be enforced."""
    return [_arguments(*each) for each in zip(names, functions, strict=True)]


def _arguments(name: str, function: Function) -> Mapping[str, Any]:
    """The schema of a tool's arguments, of what can be enforced."""
    schema = function.parameters
    if not schema:
        return NOTHING
    said = {keyword for keyword, value in schema.items() if value != []}
    if schema.get("properties") == {} and not FURTHER & said:
        return NOTHING
    try:
        read = read_schema({**ANYTHING, **schema})
    except ValueError as error:
        raise FieldError(name, f"{name}: {error}") from error
    if read.problems and function.strict:
        raise FieldError(name, f"{name}: {read.message}, or leave strict out")
    return read.schema


def _compilable(
    name: str, function: Function, schema: Mapping[str, Any], grammars: GrammarCompiler
) -> Mapping[str, Any]:
    """The schema, or that of any object if it does not compile."""
    message = _refusal(StructuredOutput(json_schema=schema), grammars)
    if message and function.strict:
        raise FieldError(name, f"{name}: {message}")
    return ANYTHING if message else schema


def _refusal(spec: StructuredOutput, grammars: GrammarCompiler) -> str:
    """Why it does not compile; empty: it does."""
    try:
        grammars.matcher(spec)
    except ValueError as error:
        return str(error)
    return ""


def _grammar(
    request: ChatRequest,
    functions: Sequence[Function],
    schemas: Sequence[Mapping[str, Any]],
    form: ToolFormat,
    grammars: GrammarCompiler,
) -> StructuredOutput:
    several = bool(request.parallel_tool_calls) and not isinstance(request.tool_choice, NamedTool)
    literal, texts = grammars.markers.literal, [guided_text(schema) for schema in schemas]
    rules = [
        f"tool{index}: {literal(function.name + form.middle)} %json {text}"
        for index, (function, text) in enumerate(zip(functions, texts, strict=True))
    ]
    rules.append("body: " + " | ".join(f"tool{index}" for index in range(len(functions))))
    call = f"call: {literal(form.opening)} body {literal(form.closing)}"
    if not is_free(request):
        start = f"{BLANK_LINE} call"
        start += r' ("\n" call)*' if several and form.begin else ""
    elif form.begin:
        tag = form.begin.rstrip("\n")
        rest = literal(form.opening.removeprefix(tag))
        call = f"call: trigger {rest} body {literal(form.closing)}"
        rules += [_trigger(tag, grammars), "tail: TEXT", r"TEXT: /(.|\n)*/"]
        start = "call* tail" if several else "call | tail"
    else:
        start = "call | text"
        rules.append(r"text: /([^{](.|\n)*)?/")
    lines = [f"start: {start}", call, *rules]
    grammar = grammars.header(" ".join(texts)) + "\n".join(lines)
    if len(grammar) > MOST_CHARACTERS:
        raise FieldError("tools", f"the tools are too large: at most {MOST_CHARACTERS} characters")
    return StructuredOutput(grammar=grammar)


def _trigger(tag: str, grammars: GrammarCompiler) -> str:
    """Rules for free text up to the tag that begins a call, however its tokens spell the tag."""
    spelled = f"spelled[lazy]: TEXT {json.dumps(tag)}"
    markers = grammars.markers
    token = f" | TEXT {markers.token(tag)}" if markers.is_special(tag) else ""
    return f"{spelled}\ntrigger: spelled{token}"
