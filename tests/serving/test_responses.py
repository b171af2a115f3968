"""`/v1/responses`: what it answers, streams and keeps. The clients are in tests/clients."""

import json
from typing import Any

import httpx
import pytest

from jaxspec import LLM
from tests.helpers.events import CITY, stream_of
from tests.helpers.served import MODEL, with_http

PATH = "/v1/responses"
ASKED = {"model": MODEL, "input": "abcabc", "temperature": 0.8, "seed": 5, "max_output_tokens": 12}
TOOLS = [{"type": "function", "name": name, "parameters": CITY} for name in ("weather", "time")]
CALL = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 150}
CALL |= {"parallel_tool_calls": False}
ITEM_EVENTS = ("output_item.added", "content_part.added", "output_text.delta")
ITEM_ENDS = ("output_text.done", "content_part.done", "output_item.done")


def posted(llm: LLM, *bodies: Any, path: str = PATH, **options: Any) -> list[dict[str, Any]]:
    """The answers to requests, one after the other."""

    async def test(http: httpx.AsyncClient) -> list[dict[str, Any]]:
        found = []
        for body in bodies:
            answer = await http.post(path, json=body)
            found.append({**answer.json(), "http": answer.status_code})
        return found

    return with_http(llm, test, **options)


def without_ids(value: Any) -> Any:
    """With ids and times left out, which differ from answer to answer."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        names = {"id", "call_id", "item_id", "created_at", "completed_at"}
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
