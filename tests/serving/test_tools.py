"""Calls in texts: the parser gives the same whatever pieces a text comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.serving.tool_formats.parser import ToolParser
from jaxspec.serving.tool_formats.syntax import CallSyntax
from jaxspec.serving.tool_formats.table import FORMATS

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}\\n"}}}\n</tool_call>'
ARGUMENTS = '{"a": {"b": "}\\n"}}'
JSON = f'{{"name": "f", "parameters": {ARGUMENTS}}}'


def parse(form: str, text: str, size: int) -> tuple[str, list[tuple[str | None, str]]]:
    """The free text, and each call's name and arguments."""
    parser = ToolParser(CallSyntax(FORMATS[form], {"f": {}}))
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.push("", last=True)
    calls = []
    for index in range(parser.calls):
        own = [part for part in parts if part.call == index]
        calls.append((own[0].name, "".join(part.text for part in own)))
    return "".join(part.text for part in parts if part.call is None), calls


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"look: {HERMES}\n{HERMES}", ("look: ", [("f", ARGUMENTS)] * 2)),
        ("hermes", f"{HERMES}\nso", ("so", [("f", ARGUMENTS)])),
        ("hermes", HERMES[:50], ("", [("f", HERMES[39:50])])),
        ("hermes", "a <tool_call", ("a <tool_call", [])),
        ("hermes", HERMES[:30], (HERMES[:30], [])),  # inside of the name's end
        ("hermes", f"{HERMES}\n{HERMES[:23]}", (HERMES[:23], [("f", ARGUMENTS)])),
        ("llama3_json", f'{{"name": "f", "parameters": {ARGUMENTS}}}', ("", [("f", ARGUMENTS)])),
        ("llama3_json", '{"nam', ('{"nam', [])),
        ("llama3_json", '{"name": "ge', ('{"name": "ge', [])),
        ("llama3_json", '{"name": "f", "param', ('{"name": "f", "param', [])),
        ("llama3_json", "so {}", ("so {}", [])),
        ("llama3_json", "", ("", [])),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_text_is_split_into_text_and_calls(form: str, text: str, expected: object, size: int):
    assert parse(form, text, size) == expected


@pytest.mark.parametrize(("form", "text"), [("hermes", HERMES), ("llama3_json", JSON)])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_of_a_text_that_is_cut_nothing_is_lost(form: str, text: str, size: int):
    """A call begins with its arguments; before that it is text. They end where JSON ends."""
    own = FORMATS[form]
    begun = len(f"{own.opening}f{own.middle}")
    for end in range(len(text)):
        free, calls = parse(form, text[:end], size)
        is_call = end >= begun
        expected = ("", [("f", ARGUMENTS[: end - begun])]) if is_call else (text[:end], [])
        assert (free, calls) == expected


@given(st.text('<tool_cal>\n{"name": }/', max_size=60), st.integers(1, 9))
def test_pieces_make_no_difference(text: str, size: int):
    for form in FORMATS:
        assert parse(form, text, size) == parse(form, text, 1000)
