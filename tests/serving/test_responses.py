"""`/v1/responses`: what it answers, streams and keeps. The clients are in tests/clients."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxspec import LLM
from jaxspec.llm.completion import Completion
from jaxspec.serving import results
from jaxspec.serving.errors import ApiError
from jaxspec.serving.protocol.responses import ResponsesRequest
from jaxspec.serving.responses.input import messages_of
from tests.helpers.events import CITY, SCRIPTS, scripted, stream_of
from tests.helpers.served import MODEL, with_http

PATH = "/v1/responses"
ASKED = {"model": MODEL, "input": "abcabc", "temperature": 0.8, "seed": 5, "max_output_tokens": 12}
TOOLS = [{"type": "function", "name": name, "parameters": CITY} for name in ("weather", "time")]
STRICT = {**TOOLS[0], "strict": True}
CALL = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 150}
CALL |= {"parallel_tool_calls": False}
ITEM_EVENTS = ("output_item.added", "content_part.added", "output_text.delta")
ITEM_ENDS = ("output_text.done", "content_part.done", "output_item.done")
STRICT_FORM = {"type": "json_schema", "strict": True}


def posted(llm: LLM, *bodies: Any, path: str = PATH, **options: Any) -> list[dict[str, Any]]:
    """The answers to requests, one after the other."""

    async def test(http: httpx.AsyncClient) -> list[dict[str, Any]]:
        found = []
        for body in bodies:
            answer = await http.post(path, json=body)
            found.append({**answer.json(), "http": answer.status_code})
        return found

    return with_http(llm, test, **options)


def messages_from(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages_of(ResponsesRequest.model_validate({"input": items}).input)


def without_ids(value: Any) -> Any:
    """With ids and times left out, which differ from answer to answer."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        names = {"id", "call_id", "item_id", "created_at", "completed_at", "cached_tokens"}
        return {name: without_ids(one) for name, one in value.items() if name not in names}
    return value


def test_a_response_is_the_text_of_a_chat(llm: LLM):
    async def test(http: httpx.AsyncClient) -> tuple[Any, Any]:
        chat = {"messages": [{"role": "user", "content": "abcabc"}], "max_tokens": 12}
        chat |= {name: ASKED[name] for name in ("model", "temperature", "seed")}
        answer = await http.post("/v1/chat/completions", json=chat)
        return (await http.post(PATH, json=ASKED)).json(), answer.json()

    found, chat = with_http(llm, test)
    [item] = found["output"]
    [part] = item["content"]
    assert part["text"] == chat["choices"][0]["message"]["content"]
    assert (item["type"], item["role"], part["type"]) == ("message", "assistant", "output_text")
    assert found["status"] == item["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = found["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 12 and usage["total_tokens"] == usage["input_tokens"] + 12


def test_what_was_asked_for_is_told(llm: LLM):
    asked = {"instructions": "be brief", "metadata": {"a": "b"}, "user": "me", "store": False}
    [found, plain] = posted(llm, {**ASKED, **asked}, {"input": "ab", "max_output_tokens": 1})
    assert {name: found[name] for name in asked} == asked
    assert (found["temperature"], found["top_p"], found["tool_choice"]) == (0.8, 1.0, "auto")
    assert (plain["temperature"], plain["store"], plain["metadata"]) == (1.0, True, {})
    assert plain["text"] == {"format": {"type": "text"}} and plain["model"] == MODEL


def test_a_tool_is_called(llm: LLM):
    named = {"type": "function", "name": "time"}
    [found, other] = posted(llm, CALL, {**CALL, "tool_choice": named})
    for answer, names in ((found, ("weather", "time")), (other, ("time",))):
        [call] = answer["output"]
        assert call["type"] == "function_call" and call["call_id"] != call["id"]
        assert call["name"] in names and call["status"] == answer["status"] == "completed"
        assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert other["tool_choice"] == named and other["tools"][0]["name"] == "weather"


def test_only_allowed_tools_are_called(llm: LLM):
    tools = [{"type": "function", "name": "time"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": tools}
    [found] = posted(llm, {**CALL, "tool_choice": allowed})
    [call] = found["output"]
    assert call["name"] == "time" and found["tool_choice"] == allowed
    assert [tool["name"] for tool in found["tools"]] == ["weather", "time"]


def test_text_matches_a_schema(llm: LLM):
    form = {"type": "json_schema", "name": "a", "schema": CITY, "strict": True}
    asked = {**ASKED, "max_output_tokens": 100, "text": {"format": form, "verbosity": "low"}}
    asked["logit_bias"] = {32: -100, 10: -100, 9: -100, 13: -100}
    [found] = posted(llm, asked)
    [item] = found["output"]
    assert json.loads(item["content"][0]["text"])["city"] in ("Rome", "Oslo")
    assert found["text"]["format"]["schema"] == CITY


@pytest.mark.parametrize("asked", [ASKED, CALL], ids=["text", "call"])
def test_a_stream_tells_the_whole_response(llm: LLM, asked: dict[str, Any]):
    async def test(http: httpx.AsyncClient) -> tuple[Any, list[dict[str, Any]]]:
        return (await http.post(PATH, json=asked)).json(), await stream_of(http, PATH, asked)

    whole, events = with_http(llm, test)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-1] == whole["status"] == events[-1]["response"]["status"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    [item] = events[-1]["response"]["output"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert [e["item"]["id"] for e in events if "item" in e] == [item["id"]] * 2
    told = "".join(event["delta"] for event in events if "delta" in event)
    if asked is ASKED:
        assert tuple(dict.fromkeys(kinds[2:-1])) == ITEM_EVENTS + ITEM_ENDS
        assert told == item["content"][0]["text"] and len(kinds) > 9
    else:
        assert told == item["arguments"] == events[-3]["arguments"]


def test_a_conversation_goes_on(llm: LLM):
    """A stored response knows its calls; its instructions are those of each request."""

    async def test(http: httpx.AsyncClient) -> None:
        first = (await http.post(PATH, json={**CALL, "instructions": "hush"})).json()
        [call] = first["output"]
        answers = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        rest = {**ASKED, "input": [answers], "previous_response_id": first["id"]}
        second = (await http.post(PATH, json=rest)).json()
        echoed = [{"role": "user", "content": "abcabc"}, *first["output"], answers]
        third = (await http.post(PATH, json={**ASKED, "input": echoed, "store": False})).json()
        assert second["usage"]["input_tokens"] == third["usage"]["input_tokens"]
        assert without_ids(second["output"]) == without_ids(third["output"])
        assert second["previous_response_id"] == first["id"]

        assert (await http.get(f"{PATH}/{second['id']}")).json() == second
        gone = await http.get(f"{PATH}/{third['id']}")
        assert gone.status_code == 404, "it was not to be stored"
        deleted = await http.delete(f"{PATH}/{second['id']}")
        assert deleted.json() == {"id": second["id"], "object": "response", "deleted": True}
        for answer in (
            await http.get(f"{PATH}/{second['id']}"),
            await http.delete(f"{PATH}/{second['id']}"),
            await http.post(PATH, json={**rest, "previous_response_id": second["id"]}),
        ):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert second["id"] in error["message"] and error["code"].endswith("_not_found")

    with_http(llm, test)


def test_a_stream_is_stored(llm: LLM):
    async def test(http: httpx.AsyncClient) -> None:
        events = await stream_of(http, PATH, ASKED)
        last = events[-1]["response"]
        assert (await http.get(f"{PATH}/{last['id']}")).json() == last

    with_http(llm, test)


def test_each_key_has_its_responses(llm: LLM):
    async def test(http: httpx.AsyncClient) -> list[int]:
        [mine, other] = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        found = (await http.post(PATH, json=ASKED, headers=mine)).json()
        answers = [await http.get(f"{PATH}/{found['id']}", headers=key) for key in (other, mine)]
        return [answer.status_code for answer in answers]

    assert with_http(llm, test, api_keys=["one", "two"]) == [404, 200]


# Parts of every kind.

STOPPED = {**ASKED, "allowed_token_ids": [256, 97], "logit_bias": {"256": 100}}
KINDS = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
OF_STREAMS = TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize("ends", ["stop", "length"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_answer_is_as_openai_types_it(
    llm: LLM, script: str, ends: str, monkeypatch: pytest.MonkeyPatch
):
    parts, kinds = SCRIPTS[script]
    scripted(monkeypatch, *parts)
    asked = {**(STOPPED if ends == "stop" else ASKED), "tools": TOOLS, "tool_choice": "none"}

    async def test(http: httpx.AsyncClient) -> tuple[Any, list[dict[str, Any]]]:
        return (await http.post(PATH, json=asked)).json(), await stream_of(http, PATH, asked)

    whole, events = with_http(llm, test)
    for event in events:
        OF_STREAMS.validate_python(event)
    Response.model_validate(whole)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    output = whole["output"]
    assert [item["type"] for item in output] == [KINDS[kind] for kind in kinds]
    *others, last = [item["status"] for item in output]
    assert set(others) <= {"completed"}
    assert last == whole["status"] == ("completed" if ends == "stop" else "incomplete")
    assert [e["item"] for e in events if e["type"].endswith("item.done")] == events[-1]["response"][
        "output"
    ]
    for place, item in enumerate(output):
        deltas = [e["delta"] for e in events if e.get("output_index") == place and "delta" in e]
        told = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(deltas) == told
    assert messages_from(output)[0]["role"] == "assistant"


def test_a_stream_that_fails_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def broken(completion: Completion) -> str:
        raise ApiError(504, "the request took too long", kind="timeout_error", code="timeout")

    monkeypatch.setattr(results, "finish_reason", broken)

    async def test(http: httpx.AsyncClient) -> tuple[httpx.Response, list[dict[str, Any]]]:
        return await http.post(PATH, json=ASKED), await stream_of(http, PATH, ASKED)

    answer, events = with_http(llm, test)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    for event in events:
        OF_STREAMS.validate_python(event)
    last, found = events[-1], events[-1]["response"]
    assert last["type"] == "response.failed" and last["sequence_number"] == len(events) - 1
    assert found["id"] == events[0]["response"]["id"] and found["status"] == "failed"
    assert found["error"] == {"code": "server_error", "message": "the request took too long"}
    [item] = found["output"]
    assert item["status"] == "incomplete"


# Requests.


def test_all_that_is_wrong_is_told_at_once(llm: LLM):
    bad = {
        "input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}],
        "background": True,
        "colour": 1,
        "temperature": "warm",
        "tools": [{"type": "web_search"}],
        "tool_choice": {"type": "mcp"},
        "truncation": "auto",
    }
    [found] = posted(llm, bad)
    assert found["http"] == 400
    message = found["error"]["message"]
    for part in (
        *("input.1: items of type 'item_reference' are not supported", "unknown field colour"),
        *("background is not supported", "tools.0: tools of type 'web_search'", "temperature: "),
        *("tool_choice: choices of type 'mcp'", "truncation is not supported"),
    ):
        assert part in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a" * 2000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        (
            {"text": {"format": {**STRICT_FORM, "schema": {"not": {"a": 1}}}}},
            "text.format",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"tools": [{**STRICT, "parameters": {"not": {}}}]}, "tools.0.parameters"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "function", "name": "fly"}, "tools": TOOLS}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"model": "other"}, "model"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name(llm: LLM, fields: dict[str, Any], param: str):
    [found] = posted(llm, {**ASKED, **fields})
    assert found["http"] in (400, 404), found
    error = found["error"]
    assert error["param"] == param and error["message"], error


def test_what_agents_send_beside_is_accepted(llm: LLM):
    fields = {
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "background": False,
        "conversation": None,
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    [found] = posted(llm, {**ASKED, **fields})
    assert found["http"] == 200
    assert (found["prompt_cache_key"], found["safety_identifier"]) == ("a", "b")


def test_items_become_messages():
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so", "logprobs": 0}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}", "caller": None},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "y"}],
            "status": None,
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}
        for name, function in (("1", "f"), ("2", "g"))
    ]
    assert messages_from(given) == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y"},
        {"role": "assistant", "content": "no"},
    ]
