"""What a chat template makes of tools and their calls, found by trying it."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxspec.serving.tool_formats.arguments import Kind
from jaxspec.serving.tool_formats.parser import ToolParser
from jaxspec.serving.tool_formats.syntax import CallSyntax
from jaxspec.serving.tool_formats.table import FORMATS, ToolFormat, told_format

# Words that no template has of itself.
NAME = "qzx_trial_tool"
ARGUMENTS = {"qzx_first": "qzx one", "qzx_second": "qzx two"}
# Ids of calls: Mistral's templates refuse others than the first, Kimi's write them as the name.
IDS = ("qzxtrial0", f"functions.{NAME}:0")
NO_TEXT = MappingProxyType({"content": ""})
USER = {"role": "user", "content": "a trial"}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "a trial",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": "string", "description": "a trial"} for key in ARGUMENTS},
            "required": list(ARGUMENTS),
        },
    },
}

# Writes a conversation, with the tool of the trial. Raises ValueError if the template refuses it.
type Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """How a chat template uses tools.

    Attributes:
      shown: whether it shows them to the model.
      form: the name of the format in which it writes calls, see FORMATS; None: one that is not
        known.
      single: whether it refuses messages of several calls, or leaves out all but one of them.
      as_text: whether it takes the arguments of a call as text, and not as an object.
      joins: whether it refuses text beside reasoning in a message of calls: they are one to it.
    """

    shown: bool
    form: str | None
    single: bool = False
    as_text: bool = False
    joins: bool = False


def tool_use(template: str, render: Render) -> ToolUse:
    """What a template does, which ``render`` writes with.

    The format is that in which it writes a call. A template that writes none, as those do that
    leave the past's out, tells it by its words.
    """
    try:
        shown = NAME in render([USER])
    except ValueError:  # it may want more than a trial has
        shown = True
    as_text = _takes_text(render)
    written = [text for id_ in IDS if (text := _written(render, [id_], as_text))]
    writes = any(NAME in text for text in written)
    two = _written(render, ["qzxtrial0", "qzxtrial1"], as_text)
    both = {"content": "a trial", "reasoning_content": "a trial"}
    return ToolUse(
        shown,
        _format_of(written) if writes else told_format(template),
        single=writes and two.count(ARGUMENTS["qzx_first"]) < 2,
        as_text=as_text,
        joins=bool(written) and not _written(render, IDS[:1], as_text, both),
    )


def _takes_text(render: Render) -> bool:
    """Whether arguments must be text: an object is refused, or written as Python does."""
    text = _written(render, IDS[:1], as_text=False)
    is_refused = not text or str(ARGUMENTS) in text
    return is_refused and bool(_written(render, IDS[:1], as_text=True))


def _written(
    render: Render, ids: Sequence[str], as_text: bool, fields: Mapping[str, str] = NO_TEXT
) -> str:
    """What the template writes of an assistant's calls; empty: it refuses them."""
    given = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    function = {"name": NAME, "arguments": given}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    answer = {"role": "assistant", **fields, "tool_calls": calls}
    try:
        before, whole = render([USER]), render([USER, answer])
    except ValueError:
        return ""
    pairs = enumerate(zip(before, whole, strict=False))
    same = next((place for place, (first, other) in pairs if first != other), len(before))
    return whole[same:]


def _format_of(written: Sequence[str]) -> str | None:
    """The format of a call that is written in some ways: that which reads it as it is, or else
    begins it so but for white space, since some templates quote or indent in a way of their own."""
    # Formats whose calls are a part of a text are more telling.
    names = sorted(FORMATS, key=lambda name: not FORMATS[name].trigger)
    for fits in (_reads, _begins):
        for name in names:
            if any(fits(FORMATS[name], text) for text in written):
                return name
    return None


def _reads(form: ToolFormat, text: str) -> bool:
    """Whether a call that is written so somewhere in a text is read as it is."""
    return any(_is_read(form, text[start:]) for start in _starts(form, text))


def _begins(form: ToolFormat, text: str) -> bool:
    """Whether the text has the beginning of a call, but for white space."""
    heads = (form.section[0] + begin + NAME + middle for begin, middle in form.heads)
    return any("".join(head.split()) in "".join(text.split()) for head in heads)


def _starts(form: ToolFormat, text: str) -> Iterator[int]:
    """Where the call may begin in the text."""
    openings = (*form.openings, *(form.section[0] + begin for begin, _ in form.heads))
    places = (text.find(opening + NAME) for opening in openings)
    return (place for place in places if place >= 0)


def _is_read(form: ToolFormat, text: str) -> bool:
    syntax = CallSyntax(form, {NAME: dict.fromkeys(ARGUMENTS, Kind.TEXT)})
    parts = ToolParser(syntax).push(text, last=True)
    arguments = "".join(part.text for part in parts if part.call == 0)
    try:
        return json.loads(arguments) == ARGUMENTS
    except ValueError:
        return False
