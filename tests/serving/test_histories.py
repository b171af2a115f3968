"""Conversations go on with what the server has written itself, wherever its texts were cut."""

import asyncio
import json
from typing import Any

import openai
import pytest

from jaxspec import LLM
from jaxspec.serving.messages import template_messages
from jaxspec.serving.tool_formats.table import FORMATS
from tests.helpers.marks import slow
from tests.helpers.served import MODEL, TEMPLATE, ask, with_client
from tests.serving.test_chat import MESSAGES, TOOLS

REQUEST: dict[str, Any] = {
    **TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "extra_body": {"return_token_ids": True},
}
# A template that writes arguments as templates of Qwen do.
JSON_TEMPLATE = TEMPLATE.replace(
    "{{ c.function.arguments.city }}",
    "({% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %})",
)


def history(message: Any, content: str | None) -> list[Any]:
    """A conversation after this answer; each tool that it calls has said ``content``."""
    calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
    said = [{"role": "tool", "tool_call_id": "1", "content": content} for _ in calls or []]
    return [*MESSAGES, message, *said, {"role": "user", "content": "so?"}]


def without_blanks(llm: LLM) -> dict[str, float]:
    """A bias against white space: line breaks that begin an answer are no part of it."""
    [blanks] = llm.tokenize(["\t\n\r "])
    return {str(token): -100 for token in blanks}


def check_nothing_is_lost(message: Any, text: str, form: str) -> None:
    """What the model wrote is in the message; of a call but what stands for it."""
    if not message.tool_calls:
        assert message.content == text
        return
    [call], own = message.tool_calls, FORMATS[form]
    written = f"{own.opening}{call.function.name}{own.middle}{call.function.arguments}"
    assert text.startswith(written) and own.end.startswith(text.removeprefix(written))
    assert not message.content


@pytest.mark.parametrize("form", ["hermes", slow("llama3_json")])
def test_an_answer_that_is_cut_anywhere_may_be_sent_back(llm: LLM, form: str):
    request = {**REQUEST, "logit_bias": without_blanks(llm)}

    async def test(client: Any) -> list[tuple[str, int]]:
        few = asyncio.Semaphore(16)  # more would wait than may

        async def create(**fields: Any) -> Any:
            async with few:
                return await client.chat.completions.create(**{**request, **fields})

        async def turns(tokens: int) -> tuple[str, int]:
            answer = await create(max_completion_tokens=tokens)
            [choice] = answer.choices
            text = llm.detokenize(choice.token_ids).removesuffix("<end>")
            check_nothing_is_lost(choice.message, text, form)
            # As an object of the client's or as a dict, whose content of tools is "".
            message, content = (
                (choice.message, None) if tokens % 2 else (choice.message.model_dump(), "")
            )
            await create(messages=history(message, content), max_completion_tokens=1)
            return choice.finish_reason, len(choice.message.tool_calls or [])

        whole = await create()
        assert whole.choices[0].finish_reason == "tool_calls"
        count = whole.usage.completion_tokens
        return await asyncio.gather(*map(turns, (*range(1, count, 3), count)))

    found = with_client(llm, test, tool_format=form, chat_template=JSON_TEMPLATE)
    assert found[-1] == ("tool_calls", 1) and {reason for reason, _ in found[:-1]} == {"length"}
    calls = [calls for _, calls in found]
    assert calls == sorted(calls) and set(calls) == {0, 1}


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_a_stream_that_is_cut_in_a_name_shows_what_was_written(llm: LLM, form: str):
    tokens = len(FORMATS[form].opening) + 2  # of a byte each
    bias = without_blanks(llm)
    request = {**REQUEST, "max_completion_tokens": tokens, "logit_bias": bias, "stream": True}
    [chunks] = ask(llm, request, tool_format=form)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text.startswith(FORMATS[form].opening) and len(text) == tokens
    assert choices[-1].finish_reason == "length"
    assert not any(choice.delta.tool_calls for choice in choices)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ('{"city": "Ro', '{"city": "Ro'),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ('{"city": "\\ud83d"}', '{"city": "\\ud83d"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=["whole", "cut", "empty", "blank", "null", "object", "half a pair", "deep"],
)
def test_arguments_are_objects_or_else_text(arguments: Any, expected: Any):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    assistant, tool = template_messages(messages)
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert (assistant["content"], tool["content"]) == ("", "")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (5, "messages.0.tool_calls must be a list of calls"),
        ([5], "a call needs a function with name"),
        ([{"function": {"arguments": "{}"}}], "a call needs a function with name"),
        ([{"function": {"name": "f", "arguments": 5}}], "the arguments of a call must be text"),
    ],
    ids=str,
)
def test_what_is_no_call_is_refused_by_name(llm: LLM, calls: Any, message: str):
    async def test(client: Any) -> str:
        messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body={"messages": messages}, cast_to=object)
        return json.dumps(caught.value.body)

    found = with_client(llm, test)
    assert message in found and MODEL not in found
