"""Streams of events that name their types, read as their clients read them."""

import json
from typing import Any

import httpx
import pytest

from jaxspec.serving.answer_parser import AnswerForm, AnswerParser
from jaxspec.serving.chat import PreparedChat
from jaxspec.serving.parts import Part

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


class Script(AnswerParser):
    """A parser that gives the parts of a script, whatever the text is: the first half of them when
    the text begins, the rest at its end."""

    def __init__(self, *parts: Part):
        super().__init__(AnswerForm())
        self._parts = list(parts)

    def push(self, piece: str, last: bool = False) -> list[Part]:
        count = len(self._parts) if last else len(self._parts) // 2
        now, self._parts = self._parts[:count], self._parts[count:]
        return now


def scripted(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    """Let the next answers of chats have these parts."""
    monkeypatch.setattr(PreparedChat, "parser", lambda _: Script(*parts))


def thought(text: str) -> Part:
    return Part(text, reasoning=True)


def call(number: int, name: str, *pieces: str) -> list[Part]:
    """The parts of a call."""
    return [Part(call=number, name=name), *(Part(piece, call=number) for piece in pieces)]


OSLO = ['{"city": ', '"Oslo"}']
BOTH = [Part("Both."), *call(0, "weather", *OSLO), *call(1, "time", "{}")]
THINKS = [thought("Let "), thought("me"), Part("So"), Part(" it is")]
# Parts of answers, and the kinds of items that they are.
SCRIPTS: dict[str, tuple[list[Part], list[str]]] = {
    "reasoning and text": (THINKS, ["reasoning", "text"]),
    "two calls": (BOTH, ["text", "call", "call"]),
    "reasoning and a call": ([thought("hm"), *call(0, "time", "{}")], ["reasoning", "call"]),
    "text after a call": ([*call(0, "time", "{}"), Part("done")], ["call", "text"]),
    "reasoning alone": ([thought("hm")], ["reasoning"]),
    "nothing": ([], ["text"]),
}
