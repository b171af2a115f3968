"""`/v1/models`, in the shapes of both APIs."""

from typing import Any

import httpx
import openai.types
import pytest

from jaxspec import LLM
from tests.helpers.served import MODEL, Served, run

HEADERS = {"anthropic-version": "2023-06-01"}
NAMES = (MODEL, "b", "org/c")


def asked(llm: LLM, *paths: str, **options: Any) -> list[Any]:
    async def test() -> list[Any]:
        async with Served(llm) as server, server.http() as http:
            server.service.names = NAMES
            answers: list[httpx.Response] = [await http.get(path, **options) for path in paths]
            return [answer.json() for answer in answers]

    return run(test())


@pytest.mark.slow  # by default: the next test, without the client's types
def test_anthropics_client_reads_them(llm: LLM):
    from anthropic.types import ModelInfo  # two seconds, in each worker  # noqa: PLC0415

    found, card = asked(llm, "/v1/models", "/v1/models/org/c", headers=HEADERS)
    infos = [ModelInfo.model_validate(one, strict=False) for one in (*found["data"], card)]
    assert [info.id for info in infos] == [*NAMES, "org/c"]
    assert infos[0].max_input_tokens == llm.engine.cache.max_length


def test_with_a_version_of_anthropic_they_have_its_shape(llm: LLM):
    found, card = asked(llm, "/v1/models", "/v1/models/org/c", headers=HEADERS)
    infos = [*found["data"], card]
    assert [info["id"] for info in infos] == [*NAMES, "org/c"]
    assert {name: found[name] for name in ("has_more", "first_id", "last_id")} == {
        "has_more": False,
        "first_id": MODEL,
        "last_id": "org/c",
    }
    assert infos[0]["max_input_tokens"] == llm.engine.cache.max_length
    assert {"display_name", "max_tokens"} <= card.keys()
    assert card["type"] == "model" and card["created_at"].endswith("Z")


def test_they_come_in_pages(llm: LLM):
    queries = ("limit=2", "limit=1&after_id=b", "limit=1&before_id=org/c", "after_id=x", "limit=0")
    pages = asked(llm, *(f"/v1/models?{query}" for query in queries), headers=HEADERS)
    assert [(p["first_id"], p["last_id"], p["has_more"]) for p in pages[:3]] == [
        (MODEL, "b", True),
        ("org/c", "org/c", False),
        ("b", "b", True),
    ]
    kinds = [(p["type"], p["error"]["type"]) for p in pages[3:]]
    assert kinds == [("error", "not_found_error"), ("error", "invalid_request_error")]


def test_without_it_they_are_openai_s(llm: LLM):
    found, card, wrong = asked(llm, "/v1/models", "/v1/models/b", "/v1/models/x")
    assert [openai.types.Model.model_validate(one).id for one in found["data"]] == list(NAMES)
    assert card["object"] == "model" and wrong["error"]["code"] == "model_not_found"
    [wrong] = asked(llm, "/v1/models/x", headers=HEADERS)
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "not_found_error")
