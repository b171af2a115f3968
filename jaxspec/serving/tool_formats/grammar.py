"""The grammar of texts that may call tools."""

from collections.abc import Mapping
from typing import Any

from jaxspec.engine.structured.added_tokens import Markers
from jaxspec.engine.structured.json_schema import guided_text
from jaxspec.engine.structured.lark import BLANK_LINE
from jaxspec.serving.tool_formats.argument_grammar import ArgumentGrammar
from jaxspec.serving.tool_formats.rules import Rules
from jaxspec.serving.tool_formats.table import ToolFormat

NUMBER = "/:[0-9]{1,3}/"
ID = "/[a-zA-Z0-9]{%d}/"


class CallGrammar:
    """Writes the grammar of a text that may call tools.

    Args:
      several: whether there may be several calls.
      whitespace: whether JSON may have white space.
    """

    def __init__(self, form: ToolFormat, markers: Markers, several: bool, whitespace: bool = True):
        self._form, self._several = form, several and not form.single
        self._rules, self._whitespace = Rules(markers), whitespace
        self._tools: dict[tuple[str, str], list[str]] = {head: [] for head in form.heads}

    @property
    def schemas(self) -> str:
        """The JSON schemas in the grammar."""
        return " ".join(self._rules.schemas)

    def add(self, name: str, schema: Mapping[str, Any], loose: bool = False) -> None:
        """Add a tool, with the schema of its arguments.

        Args:
          loose: any object will do.
        """
        form, rules = self._form, self._rules
        if form.arguments is not None:
            writer = ArgumentGrammar(form.arguments, rules, self._whitespace)
            arguments = writer.write(schema, loose)
        else:
            schema = {"type": "object"} if loose else schema
            arguments = rules.json(guided_text(schema, self._whitespace))
        for head, tools in self._tools.items():
            tools.append(rules.new(f"{self._name(name, head[1])} {arguments}"))

    def calls(self) -> str:
        """The grammar of calls alone."""
        return self._rules.lark(f"{BLANK_LINE} {self._calls(self._opening())}")

    def calls_or_text(self) -> str:
        """The grammar of free text that may have calls in it, or end with them."""
        form, rules = self._form, self._rules
        if not form.trigger:
            free = f"{rules.literal(form.text)} TEXT" if form.text else _not_beginning(form.opening)
            before = ""
            if form.preamble is not None:
                before = f"({rules.literal(form.preamble[0])} {rules.until(form.preamble[1])})?"
            return rules.lark(f"{before} {self._calls(self._opening())} | {free}")
        trigger, rest = rules.until(form.trigger), self._opening(form.trigger)
        if form.section[1]:
            return rules.lark(f"{trigger} {self._calls(rest)} | TEXT")
        call = rules.new(f"{trigger} {rest} {self._body(form.heads[0])}")
        return rules.lark(f"{call}* TEXT" if self._several else f"{call} {self._break()} | TEXT")

    def calls_or_json(self, schema: str) -> str:
        """The grammar of calls alone, or JSON of a schema alone, which guided_text returned."""
        form, rules = self._form, self._rules
        answer = f"{rules.literal(form.text)} {rules.json(schema)}"
        return rules.lark(f"{BLANK_LINE} ({self._calls(self._opening())} | {answer})")

    def _name(self, name: str, middle: str) -> str:
        """What stands between the beginning of a call and its arguments."""
        form, literal = self._form, self._rules.literal
        if form.numbered:
            return f"{literal(name)} {NUMBER} {literal(middle)}"
        if form.id_mark:
            label = f"({literal(form.id_mark)} {ID % (form.id_length or 0)})?"
            return f"{literal(name)} {label} {literal(middle)}"
        return literal(name + middle)

    def _body(self, head: tuple[str, str]) -> str:
        """A call from the name on."""
        form, rules = self._form, self._rules
        tools = rules.new(" | ".join(self._tools[head]))
        label = ""
        if form.late_id is not None:
            before, after = map(rules.literal, form.late_id)
            label = f"({before} {ID % (form.id_length or 0)} {after})?"
        return rules.new(f"{tools} {label} {rules.literal(form.end)}")

    def _calls(self, opening: str) -> str:
        form, literal = self._form, self._rules.literal
        head, *spellings = form.heads
        body, line_break = self._body(head), self._break()
        between = line_break or literal(form.separator)
        more = f"({between} {literal(form.begin)} {body})*" if self._several else ""
        calls = f"{opening} {body} {more} {literal(form.section[1])} {line_break}"
        others = [f"{literal(begin)} {self._body((begin, middle))}" for begin, middle in spellings]
        return f"({' | '.join([calls, *others])})" if others else calls

    def _opening(self, read: str = "") -> str:
        """What comes before the first name, in all ways, without what was read of it."""
        texts = [text.removeprefix(read) for text in self._form.openings]
        return f"({' | '.join(self._rules.literal(text) or '""' for text in texts)})"

    def _break(self) -> str:
        """Line breaks between calls, and after the last: some models leave them out, and others
        write them there, too."""
        form = self._form
        return BLANK_LINE if form.separator == "\n" and not form.section[1] else ""


def _not_beginning(text: str) -> str:
    return rf"/([^\{text[0]}](.|\n)*)?/"
