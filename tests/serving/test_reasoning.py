"""Chats with a model that reasons, through OpenAI's own client: from end to end."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import transformers

from jaxspec import LLM
from jaxspec.config.engine import EngineConfig
from tests.helpers.engines import CHAIN
from tests.helpers.events import stream_of
from tests.helpers.marks import slow
from tests.helpers.random_models import save_random_target
from tests.helpers.served import MODEL, ask, with_client, with_http
from tests.helpers.small_tokenizers import byte_level, with_markup

TOKENIZER = with_markup(byte_level())
TOKENIZER.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
IDS = TOKENIZER.get_vocab()
END, THINK, UNTHINK = IDS["<|im_end|>"], IDS["<think>"], IDS["</think>"]
# In the manner of Qwen3's: the prompt may begin or end the reasoning, or leave it to the model.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking is defined %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "abc"}]
ON = {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_completion_tokens": 40,
    "temperature": 1,
    "seed": 2,
    "logit_bias": {END: -100, UNTHINK: 1},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("reasoning")
    size = TOKENIZER.get_vocab_size()
    save_random_target(path, vocab_size=size, stop_token_ids=(END,))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<|im_end|>")
    fast.save_pretrained(Path(path))
    config = EngineConfig(max_rows=1, rounds_per_call=1)
    options: Any = {"speculation": CHAIN, "max_length": 256, "page_size": 8}
    return LLM(path, "ngram", engine=config, **options)


def answers(llm: LLM, fields: dict[str, Any] | None = None, **body: Any) -> tuple[Any, Any]:
    """A whole answer, and the deltas of the same one as a stream with its usage."""
    request = {**REQUEST, **(fields or {}), "extra_body": {**ON, **body}}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    whole, chunks = ask(llm, request, {**request, **stream}, chat_template=TEMPLATE)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.completion_tokens_details
    assert details == whole.usage.completion_tokens_details
    return whole, [choice.delta for chunk in chunks for choice in chunk.choices]


def allowed(*texts: str) -> dict[str, Any]:
    return {"allowed_token_ids": [IDS[text] for text in texts]}


def test_reasoning_stands_beside_the_content(llm: LLM):
    whole, deltas = answers(llm, **allowed("a", "b", "</think>"))
    [choice] = whole.choices
    tokens, message = choice.token_ids, choice.message
    end = tokens.index(UNTHINK)
    assert 0 < end < 39
    text = TOKENIZER.decode(tokens[:end])
    assert message.reasoning == message.reasoning_content == text
    assert message.content == TOKENIZER.decode(tokens[end:]).replace("</think>", "")
    assert whole.usage.completion_tokens_details.reasoning_tokens == end
    for name in ("reasoning", "reasoning_content", "content"):
        pieces = [getattr(delta, name, None) or "" for delta in deltas]
        assert "".join(pieces) == getattr(message, name)


def test_reasoning_that_reaches_the_limit_leaves_no_content(llm: LLM):
    whole, deltas = answers(llm, **allowed("a", "b"))
    [choice] = whole.choices
    assert choice.finish_reason == "length" and choice.message.content is None
    assert choice.message.reasoning == TOKENIZER.decode(choice.token_ids)
    assert whole.usage.completion_tokens_details.reasoning_tokens == 40
    assert not any(delta.content for delta in deltas)


def test_reasoning_may_be_left_out_of_the_answer(llm: LLM):
    fields = allowed("a", "b", "</think>")
    whole, _ = answers(llm, **fields)
    other, deltas = answers(llm, **fields, include_reasoning=False)
    message = other.choices[0].message
    assert message.content == whole.choices[0].message.content
    assert other.usage.completion_tokens == whole.usage.completion_tokens
    assert not any(hasattr(each, "reasoning") for each in (message, *deltas))


def test_reasoning_may_stay_in_the_content(llm: LLM):
    fields = allowed("a", "b", "</think>")
    whole, deltas = answers(llm, **fields, separate_reasoning=False)
    [choice] = whole.choices
    assert choice.message.content == TOKENIZER.decode(choice.token_ids)
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert not hasattr(choice.message, "reasoning")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    ("effort", "variables", "defaults", "begins"),
    [
        ("none", {}, {}, False),
        ("low", {}, {}, True),
        ("none", {"enable_thinking": True}, {}, True),
        (None, {}, {"enable_thinking": False}, False),
        (None, {}, {"enable_thinking": True}, True),
        ("high", {}, {"enable_thinking": False}, True),
        (None, {"enable_thinking": False}, {"enable_thinking": True}, False),
    ],
)
def test_a_request_says_whether_to_reason(
    llm: LLM,
    effort: str | None,
    variables: dict[str, Any],
    defaults: dict[str, Any],
    begins: bool,
):
    body = {**allowed("a", "b"), "chat_template_kwargs": variables}
    request = {**REQUEST, "max_completion_tokens": 4, "extra_body": body}
    request |= {"reasoning_effort": effort} if effort else {}
    [found] = ask(llm, request, chat_template=TEMPLATE, template_variables=defaults)
    message = found.choices[0].message
    assert bool(message.content) != begins and hasattr(message, "reasoning") == begins


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_goes_to_the_template(llm: LLM, name: str):
    earlier = {"role": "assistant", "content": "b", name: "so"}
    body = {"return_token_ids": True, **allowed("a")}
    request = {**REQUEST, "messages": [*MESSAGES, earlier, *MESSAGES], "extra_body": body}
    [found] = ask(llm, request, chat_template=TEMPLATE)
    prompt = TOKENIZER.decode(found.choices[0].prompt_token_ids, skip_special_tokens=False)
    assert "<think>\nso\n</think>\n\nb<|im_end|>" in prompt
    assert found.choices[0].message.content == "a" * 40


def test_reasoning_of_earlier_turns_is_text(llm: LLM):
    async def test(client: Any) -> None:
        wrong = {"role": "assistant", "content": "b", "reasoning": ["so"]}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**REQUEST, "messages": [*MESSAGES, wrong]})
        assert caught.value.param == "messages.1.reasoning"

    with_client(llm, test, chat_template=TEMPLATE)


def test_the_format_may_be_set_or_turned_off(llm: LLM):
    request = {**REQUEST, "extra_body": {**ON, **allowed("a", "</think>")}}
    [found] = ask(llm, request, chat_template=TEMPLATE, reasoning_format="none")
    assert "</think>" in found.choices[0].message.content
    assert found.usage.completion_tokens_details is None


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "</think>"]}}}
CITY |= {"required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ENDS = {"logit_bias": {END: 0, UNTHINK: 6}, "max_completion_tokens": 120}


def test_structured_output_begins_after_the_reasoning(llm: LLM):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    whole, deltas = answers(llm, {**ENDS, "response_format": schema})
    [choice] = whole.choices
    assert choice.finish_reason == "stop" and choice.message.reasoning
    assert json.loads(choice.message.content)["city"] in ("Rome", "</think>")
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_is_called_after_the_reasoning(llm: LLM, choice: str):
    fields = {**ENDS, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    if choice == "auto":
        fields["logit_bias"] = {IDS["<tool_call>"]: 7, UNTHINK: 7, END: -100}
    whole, deltas = answers(llm, fields, include_reasoning=choice == "auto")
    [found] = whole.choices
    assert (hasattr(found.message, "reasoning")) == (choice == "auto")
    [call] = found.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "</think>")
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (7, "thinking_token_budget"),
        (0, "max_thinking_tokens"),
        slow(0, "thinking_token_budget"),
        slow(7, "max_thinking_tokens"),
    ],
)
def test_a_budget_ends_the_reasoning(llm: LLM, name: str, tokens: int):
    fields = {"logit_bias": {END: -100, UNTHINK: -100}}
    whole, _ = answers(llm, fields, **{name: tokens})
    [choice] = whole.choices
    assert choice.token_ids.index(UNTHINK) == tokens
    assert choice.message.content == TOKENIZER.decode(choice.token_ids[tokens + 1 :]).lstrip("\n")
    assert whole.usage.completion_tokens_details.reasoning_tokens == tokens
    # Where the model begins it, it is counted from there.
    bias = {**fields["logit_bias"], THINK: 100}
    other, _ = answers(llm, {"logit_bias": bias}, chat_template_kwargs={}, **{name: tokens})
    assert other.choices[0].token_ids.index(UNTHINK) == tokens + 1


def test_a_budget_needs_reasoning(llm: LLM):
    async def test(client: Any) -> None:
        for body in ({"thinking_token_budget": 3}, {"max_thinking_tokens": 3}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{**REQUEST, "extra_body": body})
            assert caught.value.param == next(iter(body))

    with_client(llm, test, chat_template="{{ messages[0].content }}")


def test_structured_output_follows_a_budget(llm: LLM):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    fields = {**ENDS, "logit_bias": {UNTHINK: -100}, "response_format": schema}
    whole, _ = answers(llm, fields, thinking_token_budget=5)
    [choice] = whole.choices
    assert whole.usage.completion_tokens_details.reasoning_tokens == 5
    assert json.loads(choice.message.content)["city"] in ("Rome", "</think>")


def both(llm: LLM, path: str, body: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """A whole answer of another API, and the events of the same one."""

    async def test(http: httpx.AsyncClient) -> tuple[Any, list[dict[str, Any]]]:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json(), await stream_of(http, path, body)

    return with_http(llm, test, chat_template=TEMPLATE)


@pytest.mark.parametrize("budget", [None, 3])
def test_responses_have_it_as_an_item(llm: LLM, budget: int | None):
    body = {"input": "abc", "max_output_tokens": 40, "seed": 2, "temperature": 1}
    body |= {"logit_bias": {END: -100, UNTHINK: 1}, **allowed("a", "b", "</think>")}
    body |= {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}
    whole, events = both(llm, "/v1/responses", body)
    thought, said = whole["output"]
    assert (thought["type"], said["type"]) == ("reasoning", "message")
    text = thought["content"][0]["text"]
    count = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert count == len(text) and (budget is None or 0 < count <= budget)
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == text
    given = [{"role": "user", "content": "abc"}, *whole["output"], {"role": "user", "content": ""}]
    again = {**body, "input": given, "max_output_tokens": 1}
    more = both(llm, "/v1/responses", again)[0]["usage"]["input_tokens"]
    assert more > whole["usage"]["total_tokens"], "it comes back to the template"


@pytest.mark.slow
def test_messages_have_it_as_a_block(llm: LLM):
    long = [{"role": "user", "content": "a" * 180}]
    body = {"messages": long, "max_tokens": 2000, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    on, _ = both(llm, "/v1/messages", {**body, "thinking": thinking})
    assert on["content"][0]["type"] == "thinking" and on["content"][0]["thinking"]
    off, events = both(llm, "/v1/messages", {**body, "thinking": {"type": "disabled"}})
    assert {block["type"] for block in off["content"]} == {"text"}
    assert not [event for event in events if "thinking" in str(event)]


def test_a_budget_beside_structured_output_needs_an_end_of_one_token(llm: LLM):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    body = {"thinking_token_budget": 3}

    async def test(client: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            fields = {**REQUEST, "response_format": schema, "extra_body": body}
            await client.chat.completions.create(**fields)
        assert caught.value.param == "thinking_token_budget"

    with_client(llm, test, chat_template=TEMPLATE, reasoning_format="seed")


def test_a_budget_beside_calls_that_a_token_begins_may_end_with_several(llm: LLM):
    shown = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    template = shown + "{{ messages[0].content }}<seed:think>\n"
    fields = {**REQUEST, "tools": TOOLS, "logit_bias": {END: -100, IDS["<tool_call>"]: -100}}
    fields["extra_body"] = {"thinking_token_budget": 3, "return_token_ids": True}
    [found] = ask(llm, fields, chat_template=template)
    tokens = found.choices[0].token_ids
    assert TOKENIZER.decode(tokens[3:]).startswith("</seed:think>")
    assert found.usage.completion_tokens_details.reasoning_tokens == 3
