"""Responses that are kept, and the items that they were asked with."""

from typing import Any

import openai
import pytest

from jaxspec import LLM
from jaxspec.serving.errors import ApiError
from jaxspec.serving.responses.store import ResponseStore
from tests.helpers.served import MODEL, with_client, with_http


def kept(store: ResponseStore, names: str) -> str:
    def is_kept(name: str) -> bool:
        try:
            return bool(store.response("", name))
        except ApiError:
            return False

    return "".join(filter(is_kept, names))


def test_the_store_is_bounded():
    store = ResponseStore(most=3, most_bytes=104)
    for name in "abc":
        store.add("", name, '{"a": 1}', [], [])
    assert store.messages("", "a") == [] and len(store) == 3
    store.add("", "d", '{"a": 1}', [], [])
    assert kept(store, "bcda") == "cda", "b was used least recently"
    store.add("", "e", "x" * 85, [], [])
    assert kept(store, "abcde") == "ae", "bytes count"
    store.add("", "f", "x" * 101, [], [])
    assert kept(store, "aef") == "ae", "what is too large drives nothing out"
    store.remove("", "e")
    store.add("", "g", "x" * 85, [], [])
    assert kept(store, "aeg") == "ag"
    store.add("other", "h", "x" * 85, [], [])
    assert kept(store, "ag") == "ag", "each client has limits of its own"


def test_what_is_not_kept_is_not_promised(llm: LLM):
    async def test(http: Any) -> Any:
        body = {"input": "a", "max_output_tokens": 1}
        return (await http.post("/v1/responses", json=body)).json()

    found = with_http(llm, test, store=ResponseStore(most=0))
    assert found["store"] is False


def test_the_items_that_were_asked_with_are_told(llm: LLM):
    given = [
        {"role": "user", "content": "so?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
    ]

    async def test(client: Any) -> None:
        asked = {"model": MODEL, "max_output_tokens": 1}
        response = await client.responses.create(input=given, **asked)
        listed = client.responses.input_items.list
        pages = [item async for item in listed(response.id, limit=2)]
        [*_, first] = pages
        assert [item.type for item in pages[::-1]] == [one.get("type", "message") for one in given]
        assert len({item.id for item in pages}) == 5 and first.content[0].text == "so?"
        ordered = await listed(response.id, order="asc", limit=2)
        assert [item.id for item in ordered.data] == [item.id for item in pages[:-3:-1]]
        assert ordered.has_more and ordered.last_id == ordered.data[-1].id
        rest = await listed(response.id, order="asc", after=ordered.last_id)
        assert len(rest.data) == 3 and not rest.has_more
        again = [item.model_dump(exclude={"id", "status"}) for item in pages[::-1]]
        second = await client.responses.create(input=again, **asked)
        assert second.usage.input_tokens == response.usage.input_tokens
        for wrong in ({"limit": 0}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await listed(response.id, **wrong)
        with pytest.raises(openai.NotFoundError, match="after"):
            await listed(response.id, after="x")
        with pytest.raises(openai.NotFoundError, match="no response"):
            await listed("resp_x")

    with_client(llm, test)
