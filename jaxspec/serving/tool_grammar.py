"""The grammar that a text which may call tools must match, and how its calls are read."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.engine.structured.json_schema import guided_text, read_schema
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest, Function, NamedTool, Tool
from jaxspec.serving.tool_formats.arguments import Kind, read_arguments
from jaxspec.serving.tool_formats.grammar import CallGrammar
from jaxspec.serving.tool_formats.syntax import CallSyntax
from jaxspec.serving.tool_formats.table import ToolFormat
from jaxspec.serving.tools import earlier_calls, is_free

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


@dataclasses.dataclass(frozen=True)
class ToolGrammar:
    """Makes the grammar of a text that may call some tools.

    Arguments match the tool's schema. Of a tool that is not ``strict``, what cannot be enforced is
    left out, and a schema that does not compile allows any object.

    Attributes:
      tools: those that may be called, of the request's.
      answer: what a text without calls must look like: JSON; None: it is free.
      whitespace: whether the JSON of arguments may have white space.
    """

    request: ChatRequest
    tools: Sequence[Tool]
    form: ToolFormat
    answer: StructuredOutput | None = None
    whitespace: bool = True

    def syntax(self) -> CallSyntax:
        """How the text calls the tools. Raises FieldError, see ``compiled``."""
        arguments, names = self.form.arguments, [tool.function.name for tool in self.tools]
        kinds: list[Mapping[str, Kind]] = [{} for _ in names]
        if arguments is not None:
            kinds = [read_arguments(schema, arguments).kinds for schema in self._schemas()]
        found = dict(zip(names, kinds, strict=True))
        return CallSyntax(self.form, found, earlier_calls(self.request))

    def compiled(self, grammars: GrammarCompiler) -> StructuredOutput:
        """The grammar. It is compiled, for the engine.

        Raises FieldError, which names the tool, for a ``strict`` one whose schema cannot be
        enforced, for tools that are too large, and for a schema of the answer that does not
        compile.
        """
        schemas = self._schemas()
        grammar = self._grammar(schemas, grammars, set())
        if not _refusal(grammar, grammars):
            return grammar
        if self.answer is not None and (message := _refusal(self.answer, grammars)):
            raise FieldError("response_format", f"response_format: {message}")
        loose, started = set[int](), time.thread_time()
        for index, tool in enumerate(self.tools):
            alone = dataclasses.replace(self, tools=[tool], answer=None)
            message = _refusal(alone._grammar([schemas[index]], grammars, set()), grammars)
            if message and tool.function.strict:
                raise FieldError(self._field(tool), f"{self._field(tool)}: {message}")
            if message:
                loose.add(index)
            if time.thread_time() - started > MOST_SECONDS:
                raise FieldError("tools", "the tools take too long to compile: make them smaller")
        grammar = self._grammar(schemas, grammars, loose)
        if message := _refusal(grammar, grammars):
            raise FieldError("tools", f"tools: {message}")
        return grammar

    def known(self, grammars: GrammarCompiler) -> StructuredOutput | None:
        """The result of ``compiled`` if that takes no time, else None. Raises FieldError."""
        grammar = self._grammar(self._schemas(), grammars, set())
        is_ready = grammars.is_known(grammar) and not _refusal(grammar, grammars)
        return grammar if is_ready else None

    def _field(self, tool: Tool) -> str:
        """The field of the tool's schema in the request."""
        return f"tools.{(self.request.tools or []).index(tool)}.function.parameters"

    def _schemas(self) -> list[Mapping[str, Any]]:
        """The schemas of the arguments of tools, of what can be enforced."""
        return [_schema(self._field(tool), tool.function, self.form) for tool in self.tools]

    def _grammar(
        self, schemas: Sequence[Mapping[str, Any]], grammars: GrammarCompiler, loose: set[int]
    ) -> StructuredOutput:
        """A grammar of calls, with any arguments of the tools that are numbered in ``loose``."""
        request = self.request
        named = isinstance(request.tool_choice, NamedTool)
        several = bool(request.parallel_tool_calls) and not named
        calls = CallGrammar(self.form, grammars.markers, several, self.whitespace)
        for index, (tool, schema) in enumerate(zip(self.tools, schemas, strict=True)):
            calls.add(tool.function.name, schema, index in loose)
        if not is_free(request):
            text = calls.calls()
        elif self.answer is None:
            text = calls.calls_or_text()
        else:
            text = calls.calls_or_json(_guided(self.answer))
        text = grammars.header(calls.schemas) + text
        if len(text) > MOST_CHARACTERS:
            message = f"the tools are too large: at most {MOST_CHARACTERS} characters"
            raise FieldError("tools", message)
        return StructuredOutput(grammar=text)


def _schema(name: str, function: Function, form: ToolFormat) -> Mapping[str, Any]:
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
    if function.strict and form.arguments is not None:
        problem = read_arguments(read.schema, form.arguments).problem
        if problem:
            raise FieldError(name, f"{name}: {problem}: change that, or leave strict out")
    return read.schema


def _guided(answer: StructuredOutput) -> str:
    """The schema of an answer, with llguidance's options."""
    if answer.json_object:
        return guided_text(ANYTHING, answer.whitespace)
    read = read_schema(json.loads(str(answer.json_schema)))
    return guided_text(read.schema, answer.whitespace)


def _refusal(spec: StructuredOutput, grammars: GrammarCompiler) -> str:
    """Why it does not compile; empty: it does."""
    try:
        grammars.matcher(spec)
    except ValueError as error:
        return str(error)
    return ""
