"""Reasoning in the texts of answers: the same parts however the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.commands.serve import REASONING_FORMATS
from jaxspec.serving.answer_parser import AnswerForm, AnswerParser
from jaxspec.serving.parts import Part
from jaxspec.serving.reasoning import FORMATS, reasoning_format
from jaxspec.serving.tool_formats.syntax import CallSyntax
from jaxspec.serving.tool_formats.table import FORMATS as TOOL_FORMATS

THINK, HERMES = FORMATS["think"], CallSyntax(TOOL_FORMATS["hermes"], {"f": {}})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'


def parts_of(text: str, form: AnswerForm, cuts: tuple[int, ...] = ()) -> list[Part]:
    """The parts of a text that comes in pieces; consecutive ones of a kind are joined."""
    parser, found = AnswerParser(form), []
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    for start, end in itertools.pairwise(places):
        found += parser.push(text[start:end])
    found += parser.push("", last=True)
    joined: list[Part] = []
    for part in found:
        assert part.text or part.name is not None
        last = joined[-1] if joined else None
        if (
            last
            and part.name is None
            and (last.call, last.reasoning)
            == (
                part.call,
                part.reasoning,
            )
        ):
            joined[-1] = Part(last.text + part.text, last.call, last.name, last.reasoning)
        else:
            joined.append(part)
    return joined


def split(text: str, form: AnswerForm) -> tuple[str, str, list[str]]:
    """The reasoning, the text and the arguments of calls."""
    parts = parts_of(text, form)
    reasoning = "".join(part.text for part in parts if part.reasoning)
    free = "".join(part.text for part in parts if part.call is None and not part.reasoning)
    return reasoning, free, [part.text for part in parts if part.call is not None]


INSIDE = AnswerForm(reasoning=THINK, inside=True)
OUTSIDE = AnswerForm(reasoning=THINK)
TOOLS = AnswerForm(HERMES, THINK, inside=True)
EXACT = AnswerForm(reasoning=THINK, structured=True, trims=True)
HARMONY = AnswerForm(reasoning=FORMATS["harmony"])
HARMONY_TOOLS = AnswerForm(CallSyntax(TOOL_FORMATS["harmony"], {"f": {}}), FORMATS["harmony"])
RESPONSE = AnswerForm(reasoning=FORMATS["think_response"])
CASES = {
    "written by the model": (
        OUTSIDE,
        "<think>\nI </thin k> so.\n</think>\n\nHello <b>\n\nyou\n",
        ("I </thin k> so.", "Hello <b>\n\nyou\n", []),
    ),
    "white space before": (OUTSIDE, "\n <think>so</think>b", ("so", "b", [])),
    "begun in the prompt": (INSIDE, "I think\n\n</think>\n\nHello", ("I think", "Hello", [])),
    "none": (OUTSIDE, "\n no <think", ("", "\n no <think", [])),
    "told of": (OUTSIDE, "Write <think> first.", ("", "Write <think> first.", [])),
    "no end": (INSIDE, "cut in the mid</thin", ("cut in the mid</thin", "", [])),
    "nothing": (INSIDE, "</think>\n\nempty", ("", "empty", [])),
    "a second end": (INSIDE, "a</think>b</think>c", ("a", "bc", [])),
    "two ends": (INSIDE, "a</think>\n</think>\n\nb", ("a", "b", [])),
    "a call ends it": (TOOLS, f"Hm\n{CALL}", ("Hm", "", ['{"a": "</think>"}'])),
    "a call after it": (TOOLS, f"a</think>\n\nb\n{CALL}", ("a", "b", ['{"a": "</think>"}'])),
    "structured": (EXACT, '<think>a</think>\n\n{"a": "</think>"}', ("a", '{"a": "</think>"}', [])),
    "structured alone": (EXACT, '\n{"a": "</think>"}', ("", '{"a": "</think>"}', [])),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
        "<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant"
        "<|channel|>final<|message|>d",
        ("ac", "bd", []),
    ),
    "harmony before a call": (
        HARMONY_TOOLS,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}',
        ("a", "b", ['{"a": 1}']),
    ),
    "harmony without": (HARMONY, "<|channel|>final<|message|>d", ("", "d", [])),
    "response": (
        RESPONSE,
        "<think>a</think>\n<response>\nb\n</response>\n",
        ("a", "b\n", []),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_told_from_the_text(case: str):
    form, text, wanted = CASES[case]
    assert split(text, form) == wanted


@given(
    case=st.sampled_from(sorted(CASES)),
    cuts=st.lists(st.integers(0, 200), max_size=30).map(tuple),
)
def test_parts_do_not_depend_on_the_cuts(case: str, cuts: tuple[int, ...]):
    form, text, _ = CASES[case]
    assert parts_of(text, form, cuts) == parts_of(text, form)


PIECES = ["<think>", "</think>", "\n", " ", "a", "<", "</thi", CALL, "<response>", "</response>"]


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=30).map(tuple),
    inside=st.booleans(),
    structured=st.booleans(),
    tools=st.booleans(),
    name=st.sampled_from(["think", "think_response"]),
)
def test_parts_of_any_text_do_not_depend_on_the_cuts(
    text: str, cuts: tuple[int, ...], inside: bool, structured: bool, tools: bool, name: str
):
    is_exact = structured and not tools
    form = AnswerForm(HERMES if tools else None, FORMATS[name], inside, is_exact, structured)
    assert parts_of(text, form, cuts) == parts_of(text, form)


TEMPLATES = {
    "think": "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    "think_response": "in <think></think> and then <response></response>",
    "think_answer": "<think>\n\n</think>\n<answer>\n",
    "harmony": '{{- "<|start|>assistant<|channel|>analysis<|message|>" }}',
    "mistral": "[THINK]{{ thinking }}[/THINK]",
    "hy3": "{%- set token = ':opensource' %}{{ '<think' ~ token ~ '>' }}",
    "seed": '{%- set think_begin_token = "<seed:think>" %}',
    "mm_think": "<mm:think>",
    "kimi": "◁think▷",
    "granite": "after 'Here is my thought process:', the response after 'Here is my response:'",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_found_in_the_template(name: str):
    assert reasoning_format(None, TEMPLATES[name]) is FORMATS[name]
    assert reasoning_format(name, "") is FORMATS[name]
    assert reasoning_format("none", TEMPLATES[name]) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        # Phi's turns end as a channel of gpt-oss does.
        ("<|assistant|>{{ m.content }}<|end|>", "none"),
        # MiniMax-M2 has the results of tools in it.
        ("<minimax:tool_call> <response>{{ m.content }}</response> <think>", "think"),
        ("Give the end result as <answer>42</answer>.", "none"),
    ],
)
def test_other_uses_of_the_words_tell_no_format(template: str, name: str):
    assert reasoning_format(None, template) is reasoning_format(name, "")


def test_a_template_without_reasoning_has_no_format():
    assert reasoning_format(None, "{{ messages[0].content }}") is None


def test_the_server_can_be_told_every_format():
    assert {*REASONING_FORMATS} == {*FORMATS, "none"}
