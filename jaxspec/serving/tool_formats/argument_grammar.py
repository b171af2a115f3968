"""The grammar of arguments that are written each by itself, in the order of the schema."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.engine.structured.added_tokens import lark_string
from jaxspec.engine.structured.json_schema import guided_text
from jaxspec.serving.tool_formats.arguments import (
    Arguments,
    Kind,
    ReadArguments,
    Texts,
    read_arguments,
    texts,
    value_schema,
)
from jaxspec.serving.tool_formats.rules import Rules
from jaxspec.serving.tool_formats.table import Parameters

# Names of arguments that the schema does not list.
NAME = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"


# A text as Python writes it, and templates that know no escapes; escapes are those of JSON too.
QUOTED = r"""/'([^'\\\x00-\x08\x0b-\x1f]|\\['"\\nrt])*'/"""
# Python's words for values of these types.
WORDS = MappingProxyType({"boolean": ('"True"', '"False"'), "null": ('"None"',)})


class ArgumentGrammar:
    """Writes the arguments of a call. Without ``whitespace`` their JSON has none."""

    def __init__(self, form: Parameters, rules: Rules, whitespace: bool = True):
        self._form, self._rules, self._whitespace = form, rules, whitespace

    def write(self, schema: Mapping[str, Any], loose: bool) -> str:
        """What a call's arguments look like. Those that are ``loose`` may have any JSON as value.

        What the format cannot enforce is left out, see ReadArguments.problem.
        """
        read = read_arguments(schema, self._form)
        found = [self._sequence(read, arguments, loose) for arguments in read.alternatives]
        return self._rules.new(" | ".join(found))

    def _sequence(self, read: ReadArguments, arguments: Arguments, loose: bool) -> str:
        parts = [
            (self._rules.new(self._argument(read, name, schema, loose)), name in arguments.required)
            for name, schema in arguments.properties.items()
        ]
        further = ""
        if arguments.further is not False:
            further = self._further(read, arguments, loose)
        if self._form.separator:
            return self._separated(parts, further)
        listed = " ".join(part if required else f"{part}?" for part, required in parts)
        return f'"" {listed} {further and f"{further}*"}'

    def _separated(self, parts: list[tuple[str, bool]], further: str) -> str:
        """The parts with what stands between them, whichever of them are there."""
        new, between = self._rules.new, self._rules.literal(self._form.separator)
        after = new(f"({between} {further})*" if further else '""')
        first = new(f"({further} {after})?" if further else '""')
        for part, required in reversed(parts):
            first = new(f"{part} {after}" if required else f"{part} {after} | {first}")
            after = new(f"({between} {part}){'' if required else '?'} {after}")
        return first

    def _argument(self, read: ReadArguments, name: str, schema: Any, loose: bool) -> str:
        form, rules = self._form, self._rules
        kind = read.kinds.get(name, Kind.JSON)
        head = rules.literal(f"{form.before}{name}{form.between}{form.kinds[kind is Kind.JSON]}")
        given = texts(read.schema, schema)
        if kind is Kind.JSON or given is None:
            return f"{head} {self._json(read, schema, loose)} {rules.literal(form.after)}"
        if given.choices is None:
            return f"{head} {rules.until(form.after)}"
        choices = [rules.literal(text) for text in (*given.choices, *["null"] * given.nullable)]
        return f"{head} ({' | '.join(choices)}) {rules.literal(form.after)}"

    def _json(self, read: ReadArguments, schema: Any, loose: bool) -> str:
        given = texts(read.schema, schema)
        schema = {} if loose else value_schema(read.schema, schema)
        json = self._rules.json(guided_text(schema, self._whitespace))
        if not self._form.python:
            return json
        words = [*python_words(schema), *self._quoted(None if loose else given)]
        return f"({' | '.join([json, *words])})" if words else json

    def _quoted(self, given: Texts | None) -> list[str]:
        """How Python writes texts."""
        if given is None:
            return []
        if given.choices is None:
            return [self._rules.terminal(QUOTED)]
        return [lark_string(repr(text)) for text in given.choices if "\\" not in repr(text)]

    def _further(self, read: ReadArguments, arguments: Arguments, loose: bool) -> str:
        """An argument that is not listed."""
        form, rules = self._form, self._rules
        listed = [name for name in arguments.properties if re.fullmatch(NAME, name)]
        names = "|".join(re.sub(r"([.\-])", r"\\\1", name) for name in listed)
        name = rules.terminal(f"/{NAME}/ & ~/({names})/" if listed else f"/{NAME}/")
        value = self._json(read, arguments.further, loose)
        between = rules.literal(form.between + form.kinds[True])
        before = rules.literal(form.before)
        return rules.new(f"{before} {name} {between} {value} {rules.literal(form.after)}")


def python_words(schema: Mapping[str, Any]) -> list[str]:
    """What Python writes in another way than JSON, of a schema that lists no values."""
    types = schema.get("type", [])
    found = [types] if isinstance(types, str) else list(types)
    found = [] if "enum" in schema or "const" in schema else found
    words = [word for kind in found for word in WORDS.get(kind, ())]
    parts = [part for part in schema.get("anyOf", []) if isinstance(part, dict)]
    return list(dict.fromkeys([*words, *(word for part in parts for word in python_words(part))]))
