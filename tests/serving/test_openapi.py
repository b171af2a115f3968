"""The OpenAPI document: what it says of keys, and requests that are made from it."""

import asyncio
import collections
import functools
import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import LLM
from jaxspec.serving.app import AppOptions, make_app
from jaxspec.serving.errors import MOST_MESSAGE
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.security import OPEN
from jaxspec.serving.service import Service
from tests.helpers.events import read_events
from tests.helpers.openapi_bodies import Bodies
from tests.helpers.served import MODEL, Served


@functools.cache
def document(**options: Any) -> dict[str, Any]:
    return make_app(Service((MODEL,)), Metrics(MODEL), AppOptions(**options)).openapi()


def secured(document: dict[str, Any]) -> dict[str, bool]:
    """Of each path, whether all of its operations ask for a key."""
    return {
        path: all("security" in one for one in operations.values())
        for path, operations in document["paths"].items()
    }


def test_the_document_says_where_a_key_is_needed():
    found = document(api_keys=("x",))
    [(name, scheme)] = found["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert secured(found) == {path: path not in OPEN for path in found["paths"]}
    assert {path for path, needs in secured(found).items() if needs} >= {
        *("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize"),
        *("/v1/messages", "/v1/responses", "/v1/responses/{name}"),
    }
    assert found["paths"]["/v1/completions"]["post"]["security"] == [{name: []}]


def test_a_server_without_keys_asks_for_none():
    found = document()
    assert "securitySchemes" not in found["components"]
    assert not any(secured(found).values())


def test_the_document_and_refusals_name_all_methods_of_a_path():
    app = make_app(Service((MODEL,)), Metrics(MODEL))
    paths = {path.format(name="x"): methods for path, methods in app.openapi()["paths"].items()}
    assert paths["/ping"].keys() == {"get", "head", "post"}

    async def allowed() -> list[str]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answers = [await http.patch(path) for path in paths]
        assert all(answer.status_code == 405 for answer in answers)
        return [answer.headers["Allow"] for answer in answers]

    found = asyncio.run(allowed())
    assert found == [", ".join(sorted(map(str.upper, methods))) for methods in paths.values()]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_a_stream_is_of_events(path: str):
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}
    assert content["text/event-stream"]["itemSchema"]["required"] == ["data"]


# Requests that are made from the document.

BODIES = Bodies(
    document(),
    {
        "model": st.just(MODEL),
        "messages": st.just([{"role": "user", "content": "ab"}]),
        "input": st.just("ab"),
        "prompt": st.sampled_from(["abc", [1, 2, 3], ["a", "b"]]),
        "max_tokens": st.integers(1, 4),
    },
)
PATHS = st.sampled_from(BODIES.paths())
ALLOWED = PATHS.flatmap(
    lambda path: st.tuples(st.just(path), BODIES.allowed(path).map(json.dumps).map(str.encode))
)
MUTATED = PATHS.flatmap(lambda path: st.tuples(st.just(path), BODIES.mutated(path)))
SECONDS = 20  # of a request

type Ask = Callable[[str, bytes | None], httpx.Response]


@pytest.fixture(scope="module")
def ask(llm: LLM) -> Iterator[Ask]:
    """Sends a body, or asks for a path, and checks what each answer must be."""
    with asyncio.Runner() as runner:
        server = Served(llm, max_new_tokens=4)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(server.app, raise_app_exceptions=False),
            base_url="http://test",
        )

        async def send(path: str, body: bytes | None) -> httpx.Response:
            async with asyncio.timeout(SECONDS):
                if body is None:
                    return await client.get(path)
                headers = {"Content-Type": "application/json"}
                return await client.post(path, content=body, headers=headers)

        runner.run(server.__aenter__())
        yield lambda path, body: checked(runner.run(send(path, body)))
        runner.run(client.aclose())
        runner.run(server.__aexit__())


def checked(answer: httpx.Response) -> httpx.Response:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        check_error(answer.json())
    elif answer.text.startswith("event: "):
        for event in read_events(answer.text):
            assert event["type"].startswith(("response.", "message_", "content_block_", "error"))
    elif answer.headers["content-type"].startswith("text/event-stream"):
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "") and events
        for event in map(json.loads, (event.removeprefix("data: ") for event in events)):
            if "error" in event:
                check_error(event)
            else:
                assert "choices" in event
    else:
        assert answer.status_code == 200 and answer.json().get("error") is None
    return answer


def check_error(body: dict[str, Any]) -> None:
    """OpenAI's shape or Anthropic's, and nothing went wrong in the server."""
    error = body["error"]
    if body.get("type") == "error":
        assert body.keys() == {"type", "error", "request_id"}
        assert error.keys() - {"details"} == {"message", "type"}
    else:
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= MOST_MESSAGE and "\n" not in error["message"]
    assert error["type"] not in ("server_error", "api_error")


@pytest.mark.parametrize(
    ("requests", "least"),
    [(ALLOWED, {200: 5, 400: 5}), (MUTATED, {400: 15})],
    ids=["allowed", "almost allowed"],
)
def test_what_the_document_allows_and_almost_that_is_answered_or_refused(
    ask: Ask, requests: st.SearchStrategy[tuple[str, bytes]], least: dict[int, int]
):
    statuses: collections.Counter[int] = collections.Counter()

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(requests)
    def send(request: tuple[str, bytes]) -> None:
        statuses[ask(*request).status_code] += 1

    send()
    assert all(statuses[status] >= count for status, count in least.items()), statuses


@settings(max_examples=20, deadline=None)
@given(name=st.text(max_size=8))
def test_models_of_any_name(ask: Ask, name: str):
    path = f"/v1/models/{urllib.parse.quote(name, safe='')}"
    assert ask(path, None).status_code == (200 if name == MODEL else 404)
