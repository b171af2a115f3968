"""Texts that call tools, as each format has them, and what is parsed out of texts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.serving.parts import Part
from jaxspec.serving.tool_formats.arguments import Kind
from jaxspec.serving.tool_formats.parser import ToolParser
from jaxspec.serving.tool_formats.syntax import CallSyntax

type Call = tuple[str, dict[str, Any]]


def written(syntax: CallSyntax, calls: Sequence[Call]) -> str:
    """Calls as a model writes them, one after the other."""
    form = syntax.form
    texts = []
    for number, (name, arguments) in enumerate(calls):
        index = f":{syntax.first + number}" if form.numbered else ""
        given = _arguments(syntax, name, arguments)
        texts.append(f"{form.begin}{name}{index}{form.middle}{given}{form.end}")
    return form.section[0] + form.separator.join(texts) + form.section[1]


def _arguments(syntax: CallSyntax, name: str, arguments: Mapping[str, Any]) -> str:
    form = syntax.form.arguments
    if form is None:
        return json.dumps(arguments, ensure_ascii=False)
    parts = []
    for key, value in arguments.items():
        kind = syntax.kinds[name].get(key, Kind.JSON)
        is_json = kind is Kind.JSON
        text = json.dumps(value, ensure_ascii=False) if is_json or value is None else value
        if form.python and (value is None or isinstance(value, bool)):
            text = str(value)
        mark = form.kinds[is_json]
        parts.append(f"{form.before}{key}{form.between}{mark}{text}{form.after}")
    return form.separator.join(parts)


def parts_of(syntax: CallSyntax, pieces: Sequence[str]) -> list[Part]:
    """What is parsed out of a text that comes in pieces."""
    parser = ToolParser(syntax)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.push("", last=True)]


def text_and_calls(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """The free text, and each call's name and the text of its arguments."""
    text = "".join(part.text for part in parts if part.call is None)
    firsts = [part for part in parts if part.name is not None]
    calls = [
        (str(first.name), "".join(part.text for part in parts if part.call == first.call))
        for first in firsts
    ]
    return text, calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    """A text in pieces, cut at these places (of any size)."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
