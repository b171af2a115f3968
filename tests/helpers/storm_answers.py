"""Answers of all APIs, whole and streamed, as the same few values."""

import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass
class Choice:
    """``calls``: names and arguments. ``logprobs``: tokens and their log-probabilities."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = dataclasses.field(default_factory=list)
    ended: str | None = None
    logprobs: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    def is_like(self, other: "Choice") -> bool:
        """The same, but for the last digits of log-probabilities."""
        if dataclasses.replace(self, logprobs=[]) != dataclasses.replace(other, logprobs=[]):
            return False
        return [token for token, _ in self.logprobs] == [token for token, _ in other.logprobs] and (
            all(
                math.isclose(mine, its, abs_tol=1e-3)
                for (_, mine), (_, its) in zip(self.logprobs, other.logprobs, strict=True)
            )
        )


@dataclasses.dataclass
class Answer:
    """``usage``: tokens of the prompt, cached ones too, and tokens generated."""

    choices: list[Choice]
    usage: tuple[int, int]

    def is_like(self, other: "Answer") -> bool:
        if self.usage != other.usage or len(self.choices) != len(other.choices):
            return False
        return all(a.is_like(b) for a, b in zip(self.choices, other.choices, strict=True))


def read_whole(path: str, found: dict[str, Any]) -> Answer:
    if path == "/v1/responses":
        return _of_response(found)
    if path == "/v1/messages":
        return _of_message(found, found["content"])
    choices = [Choice() for _ in found["choices"]]
    for choice in found["choices"]:
        _add(choices[choice["index"]], choice, choice.get("message", choice))
    return Answer(choices, _usage(found["usage"]))


def read_stream(path: str, text: str) -> Answer:
    """Raises RuntimeError for a stream that has no end, or that an error ends."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    data = [line.removeprefix("data: ") for line in lines]
    typed = path in ("/v1/responses", "/v1/messages")
    if not typed and (not data or data.pop() != "[DONE]"):
        raise RuntimeError(f"no end of the stream: {text[-300:]}")
    events = [json.loads(event) for event in data]
    if broken := [event for event in events if event.get("error")]:
        raise RuntimeError(f"an error in the stream: {broken}")
    if path == "/v1/responses":
        return _of_response_events(events)
    return _of_message_events(events) if typed else _of_chunks(events)


def _of_chunks(events: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    usages = [event["usage"] for event in events if event.get("usage")]
    for event in events:
        for choice in event["choices"]:
            into = choices.setdefault(choice["index"], Choice())
            _add(into, choice, choice.get("delta", choice))
    [usage] = usages
    return Answer([choices[number] for number in sorted(choices)], _usage(usage))


def _add(into: Choice, choice: dict[str, Any], part: dict[str, Any]) -> None:
    """A choice's message, delta or text."""
    into.text += part.get("content") or part.get("text") or ""
    into.reasoning += part.get("reasoning") or ""
    into.ended = choice.get("finish_reason") or into.ended
    for position, call in enumerate(part.get("tool_calls") or []):
        index = call.get("index", position)
        while len(into.calls) <= index:
            into.calls.append(["", ""])
        into.calls[index][0] += call["function"].get("name") or ""
        into.calls[index][1] += call["function"].get("arguments") or ""
    logprobs = choice.get("logprobs") or {}
    into.logprobs += [(one["token"], one["logprob"]) for one in logprobs.get("content") or []]
    tokens = logprobs.get("tokens") or []
    into.logprobs += zip(tokens, logprobs.get("token_logprobs") or [], strict=True)


def _usage(usage: dict[str, Any]) -> tuple[int, int]:
    read, written = usage["prompt_tokens"], usage["completion_tokens"]
    if usage["total_tokens"] != read + written:
        raise RuntimeError(f"usage does not add up: {usage}")
    return read, written


def _of_response(found: dict[str, Any]) -> Answer:
    choice = Choice(ended=found["status"])
    for item in found["output"]:
        texts = "".join(part["text"] for part in item.get("content") or [])
        if item["type"] == "function_call":
            choice.calls.append([item["name"], item["arguments"]])
        elif item["type"] == "reasoning":
            choice.reasoning += texts
        else:
            choice.text += texts
    usage = found["usage"]
    if usage["total_tokens"] != usage["input_tokens"] + usage["output_tokens"]:
        raise RuntimeError(f"usage does not add up: {usage}")
    return Answer([choice], (usage["input_tokens"], usage["output_tokens"]))


def _of_response_events(events: list[dict[str, Any]]) -> Answer:
    last = events[-1]
    if last["type"] not in ("response.completed", "response.incomplete"):
        raise RuntimeError(f"no end of the stream: {last}")
    numbers = [event["sequence_number"] for event in events]
    answer = _of_response(last["response"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    text = "".join(event["delta"] for event in deltas)
    if numbers != list(range(len(numbers))) or text != answer.choices[0].text:
        raise RuntimeError(f"the events are not those of the response: {numbers}, {text!r}")
    return answer


def _of_message(found: dict[str, Any], blocks: list[dict[str, Any]]) -> Answer:
    choice = Choice(ended=found["stop_reason"])
    for block in blocks:
        choice.text += block.get("text", "")
        choice.reasoning += block.get("thinking", "")
        if block["type"] == "tool_use":  # whole ones that were cut have no arguments
            cut = choice.ended == "max_tokens"
            choice.calls.append([block["name"], "" if cut else json.dumps(block["input"])])
    usage = found["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    return Answer([choice], (usage["input_tokens"] + cached, usage["output_tokens"]))


def _of_message_events(events: list[dict[str, Any]]) -> Answer:
    if events[-1]["type"] != "message_stop":
        raise RuntimeError(f"no end of the stream: {events[-1]}")
    blocks: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    reason = None
    for event in events:
        if event["type"] == "message_start":
            usage = event["message"]["usage"]
        elif event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for name in ("text", "thinking"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
            usage |= event["usage"]
    for block in blocks:
        if block["type"] == "tool_use" and reason != "max_tokens":
            block["input"] = json.loads(block["json"] or "{}")
    return _of_message({"stop_reason": reason, "usage": usage}, blocks)
