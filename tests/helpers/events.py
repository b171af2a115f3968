"""Streams of events that name their types, read as their clients read them."""

import json
from typing import Any

import httpx

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must be nothing else: each with its type twice."""
    *blocks, end = text.split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}" and data.startswith("data: ")
    return events


async def stream_of(http: httpx.AsyncClient, path: str, body: Any) -> list[dict[str, Any]]:
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)
