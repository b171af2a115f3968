"""The storm's reader of answers (`tests/clients/storm.py`): streams are as whole ones, and what is
wrong is noticed."""

import dataclasses
from typing import Any

import httpx
import pytest

from jaxspec import LLM
from tests.clients.storm import streamed
from tests.helpers.served import MODEL, with_http
from tests.helpers.storm_answers import Answer, read_stream, read_whole

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "ab"}],
    "max_tokens": 6,
    "temperature": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "n": 2, "seed": 3, "logprobs": 2, "max_tokens": 6},
    "/v1/chat/completions": {**CHAT, "logprobs": True},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "ab", "max_output_tokens": 6, "temperature": 0},
}


@pytest.mark.parametrize("path", KINDS)
def test_whole_answers_and_streams_are_read_alike(llm: LLM, path: str):
    async def test(http: httpx.AsyncClient) -> tuple[Answer, str]:
        whole = await http.post(path, json=KINDS[path])
        stream = await http.post(path, json=streamed((path, KINDS[path])))
        return read_whole(path, whole.json()), stream.text

    whole, text = with_http(llm, test)
    assert whole.is_like(read_stream(path, text)) and whole.usage[1] >= 6
    for field, value in {
        "text": "x",
        "reasoning": "x",
        "ended": "x",
        "logprobs": [("x", 0.0)],
    }.items():
        [first, *rest] = whole.choices
        other = Answer([dataclasses.replace(first, **{field: value}), *rest], whole.usage)
        assert not other.is_like(whole)
    assert not Answer(whole.choices, (0, 6)).is_like(whole)
    with pytest.raises((RuntimeError, ValueError)):
        read_stream(path, text[: len(text) * 2 // 3])
