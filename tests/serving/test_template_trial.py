"""What a chat template does with tools is found by trying it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import openai
import pytest

from jaxspec import LLM
from jaxspec.serving.messages import template_messages
from jaxspec.serving.template_trial import TOOL, ToolUse, tool_use
from tests.helpers.served import MODEL, TEMPLATE, ask

HEAD = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
)
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
NOT_TOGETHER = (
    "{% if m.tool_calls and m.content and m.reasoning_content %}"
    "{{ raise_exception('not together') }}{% endif %}"
)
ONE = "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}"


def found(template: str) -> ToolUse:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment()

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            made = environment.from_string(template)
            return made.render(messages=messages, tools=[TOOL], raise_exception=refuse)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(str(error)) from error

    return tool_use(template, render)


@pytest.mark.parametrize(
    ("calls", "use"),
    [
        (
            '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
            "</tool_call>",
            ToolUse(True, "hermes"),
        ),
        # Arguments as text: objects are refused, or written as Python does.
        (
            '<tool_call>\n{"name": "{{ f.name }}", "arguments": '
            "{{ f.arguments + '}' }}\n</tool_call>",
            ToolUse(True, "hermes", as_text=True),
        ),
        (
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments }}}',
            ToolUse(True, "llama3_json", as_text=True),
        ),
        # The words of the template name no format.
        (
            "{{ ' to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' }}"
            "{{ f.arguments | tojson }}",
            ToolUse(True, "harmony"),
        ),
        # Kimi's ids are names and numbers.
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
            ToolUse(True, "kimi_k2"),
        ),
        (
            "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}='{{ v }}'"
            "{{ ', ' if not loop.last }}{% endfor %})]",
            ToolUse(True, "pythonic"),
        ),
        # Indented: begun as granite's, but for white space.
        (
            '<|tool_call|>[\n  {\n    "name": "{{ f.name }}",\n    "arguments": {\n'
            '      "qzx": "{{ f.arguments.qzx_first }}"\n    }\n  }\n]',
            ToolUse(True, "granite"),
        ),
        # Known words, and calls that are written in another way.
        ("<function={{ f.name }}>{{ f.arguments | tojson }}</function>", ToolUse(True, None)),
    ],
    ids=["hermes", "text", "python", "harmony", "kimi", "pythonic", "indented", "unknown"],
)
def test_the_format_is_that_in_which_a_call_is_written(calls: str, use: ToolUse):
    assert found(HEAD + CALLS + calls + END) == use


def test_a_template_that_writes_no_calls_tells_the_format_by_its_words():
    assert found(HEAD + "{# <|tool_call_start|> #}" + CALLS + END) == ToolUse(True, "lfm2")
    assert found(HEAD + CALLS + END) == ToolUse(True, "hermes")


def test_what_a_template_refuses_is_found():
    first = HEAD + "{% set f = (m.tool_calls or [{}])[0].function %}{{ f and f.name }}"
    assert found(first + "{% endfor %}").single, "it leaves out a second call"
    calls = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    assert found(HEAD + ONE + CALLS + calls + END).single
    assert found(HEAD + NOT_TOGETHER + CALLS + calls + END).joins
    assert not found(HEAD.split("{% endfor %}", 1)[1] + CALLS + calls + END).shown


CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"b":  "é"}'}}
TURN = {"role": "assistant", "reasoning": "so", "content": "well", "tool_calls": [CALL]}


def test_a_turn_is_given_as_the_template_takes_it():
    [plain] = template_messages([TURN], ToolUse(True, "hermes"))
    assert plain["tool_calls"][0]["function"]["arguments"] == {"b": "é"}
    assert (plain["reasoning"], plain["content"]) == ("so", "well")
    [other] = template_messages([TURN], ToolUse(True, "hermes", as_text=True, joins=True))
    assert other["tool_calls"][0]["function"]["arguments"] == '{"b": "é"}'
    assert (other["reasoning_content"], other["content"]) == ("so\nwell", "")


def test_a_template_of_single_calls_gets_turns_of_one_call_each():
    first, second = CALL, {**CALL, "id": "2"}
    results = [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in ("2", "1")]
    turns = [*({"role": "user", "content": "a"}, {**TURN, "tool_calls": [first, second]}), *results]
    found = template_messages([*turns, TURN], ToolUse(True, "hermes", single=True))
    said = [
        (
            m["role"],
            m["content"],
            m.get("reasoning"),
            [call["id"] for call in m.get("tool_calls", [])],
        )
        for m in found
    ]
    assert said == [
        ("user", "a", None, []),
        ("assistant", "well", "so", ["1"]),
        ("tool", "r1", None, []),
        ("assistant", "", None, ["2"]),
        ("tool", "r2", None, []),
        ("assistant", "well", "so", ["1"]),
    ]


REQUEST = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "abc"}],
    "max_completion_tokens": 99,
    "temperature": 0,
    "tools": [{"type": "function", "function": {"name": "now"}}],
    "tool_choice": "required",
}


def test_a_format_that_is_not_known_is_refused_unless_it_is_named(llm: LLM):
    template = HEAD + CALLS + "<call {{ f.name }}>" + END
    with pytest.raises(openai.BadRequestError, match=r"format that is not known.*--tool-format"):
        ask(llm, REQUEST, chat_template=template)
    [answer] = ask(llm, REQUEST, chat_template=template, tool_format="llama3_json")
    assert answer.choices[0].message.tool_calls[0].function.name == "now"


def test_a_template_of_single_calls_gets_no_second(llm: LLM):
    bias = {str(llm.tokenize([";"])[0][0]): 100}  # what begins a further call
    request = {**REQUEST, "logit_bias": bias}
    several, single = (
        ask(llm, request, chat_template=template, tool_format="llama3_json")[0].choices[0]
        for template in (TEMPLATE, HEAD + ONE + CALLS + "{{ f.name }}" + END)
    )
    assert len(several.message.tool_calls) > 1
    assert len(single.message.tool_calls) == 1 and single.finish_reason == "tool_calls"
