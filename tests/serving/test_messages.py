"""`/v1/messages`: what it answers, streams and counts. Its client is in tests/clients."""

import json
from typing import Any

import httpx
import pytest

from jaxspec import LLM
from jaxspec.commands.serve import make_parser
from jaxspec.llm.completion import Completion
from jaxspec.serving import results
from jaxspec.serving.anthropic.conversation import messages_of
from jaxspec.serving.anthropic.prepare import chat_request
from jaxspec.serving.errors import ApiError
from jaxspec.serving.protocol.messages import MessagesRequest
from jaxspec.serving.service import Service
from tests.helpers.events import CITY, SCRIPTS, scripted, stream_of
from tests.helpers.served import MODEL, Served, run, with_http

PATH = "/v1/messages"
SAYS = [{"role": "user", "content": "abcabc"}]
ASKED = {"model": MODEL, "messages": SAYS, "temperature": 0, "max_tokens": 12}
TOOLS = [{"name": name, "input_schema": CITY} for name in ("weather", "time")]
CALL = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
CALL |= {"max_tokens": 150}
KINDS = {"reasoning": "thinking", "text": "text", "call": "tool_use"}


def both(llm: LLM, body: Any, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and the events of a stream."""

    async def test(http: httpx.AsyncClient) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        answer = await http.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json(), await stream_of(http, PATH, body)

    return with_http(llm, test, **options)


def posted(
    llm: LLM, body: Any, path: str = PATH, headers: Any = None, **options: Any
) -> httpx.Response:
    async def test(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(path, json=body, headers=headers)

    return with_http(llm, test, **options)


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells, put together as clients do it."""
    [start, *rest, last, stop] = events
    assert (start["type"], last["type"], stop) == (
        *("message_start", "message_delta"),
        {"type": "message_stop"},
    )
    message = {**start["message"], **last["delta"], "usage": last["usage"]}
    texts: list[str] = []
    for event in rest:
        place = event["index"]
        match event:
            case {"content_block": block}:
                assert place == len(message["content"]) == len(texts)
                message["content"].append(dict(block))
                texts.append("")
            case {"delta": {"type": "signature_delta", "signature": signature}}:
                message["content"][place]["signature"] = signature
            case {"delta": {"type": kind, **piece}}:
                [(name, text)] = piece.items()
                texts[place] += text
                assert kind.removesuffix("_delta") in ("text", "thinking", "input_json")
                if name != "partial_json":
                    message["content"][place][name] = texts[place]
            case _:
                assert event == {"type": "content_block_stop", "index": len(texts) - 1}
                if message["content"][place]["type"] == "tool_use":
                    message["content"][place]["input"] = json.loads(texts[place])
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content, "usage": message["usage"]["output_tokens"]}


def test_a_message_is_the_text_of_a_chat(llm: LLM):
    async def test(http: httpx.AsyncClient) -> tuple[Any, Any]:
        chat = {**ASKED, "messages": [{"role": "system", "content": "hush"}, *SAYS]}
        system = [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1f;"},
            {"type": "text", "text": "hush", "cache_control": {"type": "ephemeral"}},
        ]
        answer = await http.post("/v1/chat/completions", json=chat)
        return (await http.post(PATH, json={**ASKED, "system": system})).json(), answer.json()

    found, chat = with_http(llm, test)
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage, own = chat["usage"], found["usage"]
    assert own["input_tokens"] + own["cache_read_input_tokens"] == usage["prompt_tokens"]
    assert own["output_tokens"] == 12


@pytest.mark.parametrize("asked", [ASKED, CALL], ids=["text", "tool"])
def test_a_stream_tells_the_whole_message(llm: LLM, asked: dict[str, Any]):
    whole, events = both(llm, asked)
    assert without_ids(message_of(events)) == without_ids(whole)
    if asked is CALL:
        [block] = whole["content"]
        assert block["input"]["city"] in ("Rome", "Oslo") and whole["stop_reason"] == "tool_use"
        assert block["name"] in ("weather", "time") and block["id"]
    else:
        assert len(events) > 6


@pytest.mark.parametrize("ends", ["end_turn", "max_tokens"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_parts_of_every_kind_are_blocks(
    llm: LLM, script: str, ends: str, monkeypatch: pytest.MonkeyPatch
):
    parts, kinds = SCRIPTS[script]
    scripted(monkeypatch, *parts)
    if ends == "end_turn":
        monkeypatch.setattr(results, "finish_reason", lambda _: "stop")
    whole, events = both(llm, ASKED)
    assert without_ids(message_of(events)) == without_ids(whole)
    assert [block["type"] for block in whole["content"]] == [KINDS[kind] for kind in kinds]
    is_called = "call" in kinds and ends == "end_turn"
    assert whole["stop_reason"] == ("tool_use" if is_called else ends)
    assert all(block["signature"] for block in whole["content"] if block["type"] == "thinking")
    again = MessagesRequest.model_validate(
        {**ASKED, "messages": [*SAYS, {"role": "assistant", "content": whole["content"]}]}
    )
    assert messages_of(None, again.messages)[-1]["role"] == "assistant"


def test_a_tool_that_was_cut_has_no_input(llm: LLM):
    whole, _ = both(llm, {**CALL, "max_tokens": 55})
    assert whole["stop_reason"] == "max_tokens"
    [block] = whole["content"]
    assert (block["type"], block["input"]) == ("tool_use", {})


def test_a_stop_sequence_is_told(llm: LLM):
    text = posted(llm, ASKED).json()["content"][0]["text"]
    stop = text[5]
    whole, events = both(llm, {**ASKED, "stop_sequences": ["\u2603", stop]})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text.split(stop)[0]
    assert without_ids(message_of(events)) == without_ids(whole)


def test_more_tokens_may_be_asked_for_than_fit(llm: LLM):
    long = [{"role": "user", "content": "a" * (llm.engine.cache.max_length - 30)}]
    whole = posted(llm, {**ASKED, "messages": long, "max_tokens": 32_000}).json()
    assert whole["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    assert whole["usage"]["output_tokens"] < 30


def test_the_assistants_text_is_gone_on_with(llm: LLM):
    begun = {"messages": [*SAYS, {"role": "assistant", "content": "ab"}]}
    count = posted(llm, begun, f"{PATH}/count_tokens").json()["input_tokens"]
    assert count == len(llm.tokenize(["<user>abcabc<assistant>ab"])[0])
    answer = posted(llm, {**ASKED, **begun}).json()
    assert sum(answer["usage"].values()) == count + 12


def test_a_model_may_have_several_names(llm: LLM):
    options = ["--served-model-name", MODEL, "claude", "--port", "0"]
    names = make_parser().parse_args(options).served_model_name

    async def test() -> httpx.Response:
        async with Served(llm) as server, server.http() as http:
            server.service.names = tuple(names)
            return await http.post(PATH, json={**ASKED, "model": "claude"})

    assert run(test()).json()["model"] == MODEL


def test_tokens_are_counted(llm: LLM):
    body = {name: CALL[name] for name in ("model", "messages", "tools")}
    count = posted(llm, body, f"{PATH}/count_tokens?beta=true").json()
    usage = posted(llm, {**CALL, "max_tokens": 1}).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


# Conversations.


def test_blocks_become_messages():
    given = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "other"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so", "citations": None},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}, "caller": None},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and"},
                {"type": "tool_result", "tool_use_id": "1", "content": "x"},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "y"}],
                },
            ],
        },
    ]
    request = MessagesRequest.model_validate({**ASKED, "messages": given, "system": "s"})
    calls = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        for name, tool, arguments in (("1", "f", '{"a": 1}'), ("2", "g", "{}"))
    ]
    assert messages_of(request.system, request.messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: y"},
        {"role": "user", "content": "and"},
    ]


@pytest.mark.parametrize(
    ("thinking", "is_on", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
        ({"type": "disabled"}, False, None),
        ({"type": "adaptive"}, None, None),
    ],
)
def test_thinking_is_what_chats_call_it(thinking: Any, is_on: bool | None, budget: int | None):
    request = MessagesRequest.model_validate({**ASKED, "thinking": thinking})
    found = run(chat_request(Service((MODEL,)), request, {}))
    assert found.thinking_token_budget == budget
    expected = None if is_on is None else {"enable_thinking": is_on, "thinking": is_on}
    assert found.chat_template_kwargs == expected


LATE = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
EARLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('too late') }}{% endif %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(LATE, "[s:a\nb][u:c][s:d][u:e]"), (EARLY, "[s:a\nb\nd][u:c][u:e]")],
    ids=["anywhere", "in front"],
)
def test_a_late_system_message_stands_where_the_template_takes_it(
    llm: LLM, template: str, prompt: str
):
    turns = [("system", "b"), ("user", "c"), ("system", "d"), ("user", "e")]
    messages = [{"role": role, "content": text} for role, text in turns]
    body = {"messages": messages, "system": "a"}
    count = posted(llm, body, f"{PATH}/count_tokens", chat_template=template).json()
    assert count["input_tokens"] == len(llm.tokenize([prompt])[0])


# Errors.


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return {"status": answer.status_code, **body["error"]}


def test_all_that_is_wrong_is_told_at_once(llm: LLM):
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    bad = {**ASKED, "messages": [image], "colour": 1, "max_tokens": 0, "mcp_servers": [{}]}
    bad |= {"tools": [{"type": "bash_20250124", "name": "bash"}], "thinking": {"type": "on"}}
    error = error_of(posted(llm, bad))
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    for part in (
        *(
            "messages.0.content.0: a user's blocks of type 'image' are not supported",
            "max_tokens: ",
        ),
        *("unknown field colour", "mcp_servers is not supported", "tools of type 'bash_20250124'"),
        "thinking.type: ",
    ):
        assert part in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"model": "other"}, 404, "'other' does not exist"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages of role 'tool'"),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, 400, "do not fit"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, 400, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, 400, "no tool 'x'"),
        (
            {"tools": [{"name": "a", "strict": True, "input_schema": {"not": {}}}]},
            400,
            "tools.0.input_schema",
        ),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "less than max_tokens"),
        ({"thinking": {"type": "enabled"}}, 400, "thinking.budget_tokens belongs to"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {"a": 1}}}}},
            400,
            "output_config.format",
        ),
    ],
)
def test_a_bad_field_is_refused_by_name(llm: LLM, fields: dict[str, Any], status: int, part: str):
    error = error_of(posted(llm, {**ASKED, **fields}))
    assert error["status"] == status and part in error["message"], error
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_clients_that_keep_threads_are_told_to_do_without(llm: LLM):
    error = error_of(posted(llm, {**ASKED, "thread": {"type": "create"}}))
    assert error["status"] == 400
    assert error["details"]["error_code"] == "thread_unsupported_request"


def test_fields_that_change_nothing_are_accepted(llm: LLM):
    fields = {
        "metadata": {"user_id": "a"},
        "service_tier": "auto",
        "betas": ["x"],
        "context_management": {"edits": []},
        "thinking": {"type": "disabled", "display": "omitted"},
        "tools": [{**TOOLS[0], "cache_control": {}, "input_examples": [], "type": "custom"}],
        "tool_choice": {"type": "none"},
    }
    assert posted(llm, {**ASKED, **fields}).status_code == 200


def test_keys_are_taken_as_anthropic_sends_them(llm: LLM):
    statuses = {}
    for name, headers in {
        "bearer": {"Authorization": "Bearer one"},
        "own": {"X-Api-Key": "one"},
        "wrong": {"X-Api-Key": "two"},
    }.items():
        answer = posted(llm, ASKED, headers=headers, api_keys=["one"])
        statuses[name] = answer.status_code
    assert statuses == {"bearer": 200, "own": 200, "wrong": 401}
    error = error_of(posted(llm, ASKED, api_keys=["one"]))
    assert error["type"] == "authentication_error"


def test_middleware_speaks_anthropics_words(llm: LLM):
    large = error_of(posted(llm, {**ASKED, "system": "a" * 300}, max_body=200))
    assert (large["status"], large["type"]) == (413, "request_too_large")


def test_a_stream_that_fails_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def broken(completion: Completion) -> str:
        raise ApiError(504, "the request took too long", kind="timeout_error", code="timeout")

    monkeypatch.setattr(results, "finish_reason", broken)

    async def test(http: httpx.AsyncClient) -> tuple[httpx.Response, list[dict[str, Any]]]:
        return await http.post(PATH, json=ASKED), await stream_of(http, PATH, ASKED)

    answer, events = with_http(llm, test)
    assert error_of(answer)["type"] == "timeout_error"
    assert events[0]["type"] == "message_start"
    assert events[-1]["error"] == {"type": "timeout_error", "message": "the request took too long"}
