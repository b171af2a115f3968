"""`/v1/chat/completions`, through OpenAI's own client: answers, structured outputs and tools."""

import json
import re
from typing import Any

import openai
import pytest

from jaxspec import LLM
from tests.helpers.served import MODEL, TEMPLATE, ask

MESSAGES = [{"role": "user", "content": "abcabc"}]
SAMPLED = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_completion_tokens": 30,
    "temperature": 0.8,
    "seed": 5,
}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 22]}, "on": {"type": "boolean"}},
    "required": ["size", "on"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY}}


TOOLS = {**SAMPLED, "tools": [tool("weather"), tool("time")], "max_completion_tokens": 150}


def test_an_answer_is_that_of_the_library(llm: LLM):
    from_parts = [{"role": "user", "content": [{"type": "text", "text": "abcabc"}]}]
    found = ask(llm, SAMPLED, {**SAMPLED, "messages": from_parts})
    prompt = llm.chat_prompts(MESSAGES, TEMPLATE)[0]
    assert [len(prompt)] * 2 == [answer.usage.prompt_tokens for answer in found]
    first, second = (answer.choices[0] for answer in found)
    assert first.message.content == second.message.content
    assert first.message.role == "assistant" and first.finish_reason == "length"


def test_no_answer_ends_before_its_least_tokens(llm: LLM):
    [end] = llm.params.target.config.stop_token_ids
    at_once = {**SAMPLED, "logit_bias": {end: 100}}
    early, late = ask(llm, at_once, {**at_once, "extra_body": {"min_tokens": 5}})
    assert [answer.usage.completion_tokens for answer in (early, late)] == [1, 6]
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        ask(llm, {**SAMPLED, "extra_body": {"min_tokens": 31}})
    assert caught.value.param == "min_tokens"


def test_a_stream_is_the_whole_answer_in_pieces(llm: LLM):
    request = {**SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["e"]}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    whole, chunks = ask(llm, request, {**request, **stream})
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert own[0].delta.role == "assistant" and own[1].delta.role is None
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
        entries = [entry for c in own if c.logprobs for entry in c.logprobs.content]
        assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert all(
            entry.bytes == list(entry.token.encode())
            for entry in entries
            if "\ufffd" not in entry.token
        )
        spelt = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
        assert spelt.startswith(choice.message.content)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "config", "schema": SCHEMA, "strict": True},
                },
                "logit_bias": {32: -100, 10: -100, 9: -100, 13: -100},
            },
            r"\s*\{.*\}",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "[a-c]{4}"}}}, "[a-c]{4}"),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, "yes|no"),
    ],
    ids=["json_schema", "regex", "choice"],
)
def test_a_structured_output_matches(llm: LLM, fields: dict[str, Any], pattern: str):
    [answer] = ask(llm, {**SAMPLED, "max_completion_tokens": 100, **fields})
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.message.content, re.DOTALL)
    if "response_format" in fields:
        assert set(json.loads(choice.message.content)) == {"size", "on"}


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["required", "time"])
def test_a_tool_is_called(llm: LLM, form: str, choice: str):
    named = {"type": "function", "function": {"name": choice}}
    bias = {32: -100, 10: -100, 9: -100, 13: -100} if form == "llama3_json" else {}
    request = {
        **TOOLS,
        "tool_choice": choice if choice == "required" else named,
        "parallel_tool_calls": False,
        "logit_bias": bias,
    }
    answer, chunks = ask(llm, request, {**request, "stream": True}, tool_format=form)
    [found] = answer.choices
    assert found.message.content is None and found.finish_reason == "tool_calls"
    [call] = found.message.tool_calls
    assert call.type == "function" and call.id
    assert call.function.name in (("weather", "time") if choice == "required" else ("time",))
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")

    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert parts[0].id and parts[0].function.name == call.function.name
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert not any(delta.content for delta in deltas)


def test_a_stream_has_the_ids_of_tokens_whose_text_is_held_back(llm: LLM):
    """All of it may begin a stop string."""
    [[letter]] = llm.tokenize(["a"])
    held = {"logit_bias": {letter: 100}, "stop": ["a" * 60]}
    request = {**SAMPLED, **held, "extra_body": {"return_token_ids": True}}
    whole, chunks = ask(llm, request, {**request, "stream": True})
    parts = [choice for chunk in chunks for choice in chunk.choices]
    ids = [token for part in parts for token in getattr(part, "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids == [letter] * 30


def test_text_is_free_where_a_tool_may_be_called(llm: LLM):
    short = {**TOOLS, "max_completion_tokens": 10}
    [auto, none] = ask(llm, short, {**short, "tool_choice": "none"})
    for answer in (auto, none):
        [choice] = answer.choices
        assert choice.message.tool_calls is None and choice.message.content


def test_the_answer_of_a_tool_is_part_of_the_conversation(llm: LLM):
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "developer", "content": "be brief"},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    body = {"return_token_ids": True}
    [answer] = ask(llm, {**SAMPLED, "messages": messages, "extra_body": body})
    text = llm.detokenize(answer.choices[0].prompt_token_ids)
    assert text == "<system>be brief<user>abcabc<assistant>Rome<tool>sunny<assistant>"


def test_a_model_without_a_template_says_what_to_do(llm: LLM):
    with pytest.raises(openai.BadRequestError, match="--chat-template") as caught:
        ask(llm, SAMPLED, chat_template=None)
    assert caught.value.code == "no_chat_template"
