"""Tools with other fields of a chat: which may be called, and what an answer is without a call."""

import json
from typing import Any

import openai
import pytest

from jaxspec import LLM
from tests.helpers.marks import slow
from tests.helpers.served import MODEL, TEMPLATE, ask

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
ANSWER = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
ANSWER |= {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER, "strict": True}}
REQUEST = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "abc"}],
    "max_completion_tokens": 190,
    "temperature": 0,
    "parallel_tool_calls": False,
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": CITY}}
        for name in ("weather", "time", "news")
    ],
}


def answer(llm: LLM, form: str = "hermes", **fields: Any) -> Any:
    """The one choice of a chat; a stream of the same request has the same content and calls."""
    request = {**REQUEST, **fields}
    whole, chunks = ask(llm, request, {**request, "stream": True}, tool_format=form)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    [choice] = whole.choices
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
    calls = [part for delta in deltas for part in delta.tool_calls or []]
    wanted = choice.message.tool_calls or []
    assert [call.function.name for call in calls if call.id] == [c.function.name for c in wanted]
    arguments = "".join(call.function.arguments for call in calls)
    assert arguments == "".join(call.function.arguments for call in wanted)
    return choice


def bias(llm: LLM, first: str, value: int) -> dict[str, int]:
    """A bias for a letter, and against white space."""
    letters = {first: value, "\n": -100, " ": -100, "\t": -100}
    return {str(llm.tokenize([letter])[0][0]): value for letter, value in letters.items()}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("form", ["hermes", slow("qwen3_coder"), slow("kimi_k2")])
def test_an_answer_is_a_call_or_json_of_the_schema(llm: LLM, form: str):
    called = answer(llm, form, response_format=FORMAT, logit_bias=bias(llm, "<", 100))
    assert called.finish_reason == "tool_calls" and called.message.content is None
    [call] = called.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    said = answer(llm, form, response_format=FORMAT, logit_bias=bias(llm, "{", 100))
    assert said.finish_reason == "stop" and said.message.tool_calls is None
    assert set(json.loads(said.message.content)) == {"on"}
    must = answer(llm, form, response_format=FORMAT, tool_choice="required")
    assert must.finish_reason == "tool_calls"


def test_calls_and_answers_that_begin_alike_are_told_apart(llm: LLM):
    found = answer(llm, "llama3_json", response_format=FORMAT)
    if found.finish_reason == "tool_calls":
        assert found.message.content is None
    else:
        assert set(json.loads(found.message.content)) == {"on"}


def test_only_allowed_tools_are_called(llm: LLM):
    for names in (["time"], ["time", "news"]):
        found = answer(llm, tool_choice=allowed("required", *names))
        [call] = found.message.tool_calls
        assert call.function.name in names
    likely = bias(llm, "<", 100)
    for limit in (4, 120):  # free text of "<" alone is never a marker
        fields = {"logit_bias": likely, "max_completion_tokens": limit}
        found = answer(llm, tool_choice=allowed("auto", "news"), **fields)
        assert found.message.content and found.message.tool_calls is None


def test_ids_of_mistral_and_kimi_are_theirs(llm: LLM):
    [call] = answer(llm, "mistral", tool_choice="required").message.tool_calls
    assert len(call.id) == 9 and call.id.isalnum()
    function = {"name": "time", "arguments": '{"city": "Rome"}'}
    earlier = {"id": "functions.time:0", "type": "function", "function": function}
    messages = [
        *REQUEST["messages"],
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "functions.time:0", "content": "noon"},
    ]
    found = answer(llm, "kimi_k2", tool_choice="required", messages=messages)
    [call] = found.message.tool_calls
    name, number = call.id.removeprefix("functions.").split(":")
    assert name == call.function.name and int(number) >= 1


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": allowed("auto", "weather", "x")}, "tool_choice", "no tool 'x'"),
        ({"tool_choice": allowed("never", "time")}, "tool_choice.allowed_tools.mode", ""),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", ""),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "choices of type 'custom'"),
        ({"tools": REQUEST["tools"] * 2}, "tools.3.function.name", "the same name, 'weather'"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a"}}},
            "tools",
            "tools go together with JSON",
        ),
        (
            {"response_format": {**FORMAT, "json_schema": {"schema": {"type": "any"}}}},
            "response_format",
            "json_schema",
        ),
    ],
    ids=["unknown", "mode", "empty", "kind", "twice", "regex", "schema"],
)
def test_what_does_not_go_together_is_refused_by_name(
    llm: LLM, fields: dict[str, Any], param: str, words: str
):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(llm, {**REQUEST, **fields})
    assert caught.value.param == param and words in str(caught.value)


def test_a_template_that_ignores_tools_is_refused(llm: LLM):
    silent = TEMPLATE.split("{% endif %}", 1)[1]
    assert "tools" in TEMPLATE and "tools" not in silent
    with pytest.raises(openai.BadRequestError, match="does not show tools to the model") as caught:
        ask(llm, REQUEST, chat_template=silent)
    assert caught.value.param == "tools"
    [plain] = ask(llm, {**REQUEST, "tool_choice": "none"}, chat_template=silent)
    assert plain.choices[0].message.content is not None


def test_what_cannot_be_enforced_is_left_out_unless_it_is_strict(llm: LLM):
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    schema = {"type": "object", "properties": {"a": unique}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = answer(llm, tool_choice="none", response_format=form)
    assert set(json.loads(found.message.content)["a"]) <= {1, 2}
    form["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"properties\.a\.uniqueItems cannot be"):
        ask(llm, {**REQUEST, "tool_choice": "none", "response_format": form})
