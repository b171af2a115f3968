"""Log-probabilities of the texts of responses."""

from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxspec import LLM
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import TextOptions
from jaxspec.serving.answer_parser import AnswerForm
from jaxspec.serving.reasoning import FORMATS
from jaxspec.serving.responses.logprobs import TextTokens
from tests.helpers.events import stream_of
from tests.helpers.served import MODEL, with_http

PATH = "/v1/responses"
INCLUDE = {"include": ["message.output_text.logprobs"]}
ASKED = {"model": MODEL, "input": "abcabc", "temperature": 0.8, "seed": 5, "max_output_tokens": 12}
ASKED |= {**INCLUDE, "top_logprobs": 2}


def test_they_are_those_of_a_chat_whole_and_streamed(llm: LLM):
    async def test(http: httpx.AsyncClient) -> tuple[Any, Any, Any]:
        chat = {"messages": [{"role": "user", "content": "abcabc"}], "max_tokens": 12}
        chat |= {name: ASKED[name] for name in ("model", "temperature", "seed", "top_logprobs")}
        answer = await http.post("/v1/chat/completions", json={**chat, "logprobs": True})
        found = (await http.post(PATH, json=ASKED)).json()
        return answer.json(), found, await stream_of(http, PATH, ASKED)

    chat, found, events = with_http(llm, test)
    expected = chat["choices"][0]["logprobs"]["content"]
    [item] = found["output"]
    [part] = item["content"]
    assert part["logprobs"] == expected and len(expected) == 12
    assert found["top_logprobs"] == 2 == len(expected[0]["top_logprobs"])
    Response.model_validate(found, strict=True)
    for event in events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event, strict=True)
    by_type = {event["type"]: event for event in events}
    assert by_type["response.incomplete"]["response"]["output"][0]["content"] == [part]
    streamed = [
        entry
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert streamed == by_type["response.output_text.done"]["logprobs"]
    assert [(one["token"], one["logprob"]) for one in streamed] == [
        (one["token"], one["logprob"]) for one in expected
    ]
    assert "bytes" not in streamed[0] and len(streamed[0]["top_logprobs"]) == 2


@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {**INCLUDE, "top_logprobs": 21}])
def test_top_logprobs_belong_to_the_include(llm: LLM, asked: dict[str, Any]):
    async def test(http: httpx.AsyncClient) -> Any:
        body = {"input": "a", "max_output_tokens": 1, **asked}
        return (await http.post(PATH, json=body)).json()

    assert with_http(llm, test)["error"]["param"] == "top_logprobs"


class Prepared:
    """What is read of a prepared chat, for a model whose tokens are pieces of text."""

    def __init__(self, pieces: list[str]):
        self.pieces, self.prompts, self.options = pieces, [[]], TextOptions()
        self.form = AnswerForm(reasoning=FORMATS["think"])
        self.service = self.llm = self

    def detokenize(self, ids: list[int], skip_special: bool = False) -> str:
        return "".join(self.pieces[token] for token in ids)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_tokens_of_markers_are_of_no_part(at_once: bool):
    pieces = ["<think>", "\n", "so", " th", "</", "think", ">", "\n\n", "th", "en", "\n", "!"]
    prepared: Any = Prepared(pieces)
    tokens = TextTokens(prepared)
    entries = [TokenLogprob(index, 0.0, ()) for index in range(len(pieces))]
    first = len(entries) if at_once else 5
    tokens.add(entries[:first])
    parts = [tokens.take("so"), tokens.take(" th")]
    tokens.add(entries[first:])
    parts += [tokens.take("t"), tokens.take("hen\n"), tokens.take("!")]
    ids = [[entry.token_id for entry in part] for part in parts]
    assert ids == [[2], [3], [8], [9, 10], [11]]
