"""return_speculation, plain, and the page's files, against the application."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM
from tests.helpers.engines import FULL, seal, tiny_llm
from tests.helpers.served import MODEL, Served, ask, run

pytestmark = pytest.mark.slow
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "temperature": 0}
PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def showing(model: Path) -> LLM:
    llm = tiny_llm(model, trees=True)
    seal(llm.engine, dataclasses.replace(FULL, plain=True))
    return llm


def committed_text(rounds: list[dict[str, Any]]) -> str:
    texts = [rounds[0]["nodes"][0]["text"]]
    for tree in rounds:
        path = [tree["nodes"][node]["text"] for node in tree["path"][1:]]
        texts += [*path, tree["bonus"]["text"]][: tree["committed"]]
    return "".join(texts)


def streamed(llm: LLM, chat: bool, **extra: Any) -> tuple[str, list[dict[str, Any]], Any]:
    """Text, rounds, and the last speculation of a stream."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    extra_body = {"return_speculation": True, **extra}
    [chunks] = ask(llm, {**BODY, **prompt, "stream": True, "extra_body": extra_body})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join((one.delta.content if chat else one.text) or "" for one in choices)
    told = [getattr(one, "speculation", None) or {} for one in choices]
    return text, [tree for one in told for tree in one.get("trees", [])], told[-1]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_has_the_tree_of_each_round(showing: LLM, chat: bool):
    text, rounds, last = streamed(showing, chat)
    assert last["rounds"] == len(rounds)
    assert last["drafted"] == sum(len(tree["nodes"]) - 1 for tree in rounds) > 0
    # Random bytes may be parts of characters, which have no text of their own.
    assert "\ufffd" in text or committed_text(rounds) == text
    plain, plain_rounds, last = streamed(showing, chat, plain=True)
    assert plain == text and last["drafted"] == 0
    assert {len(tree["nodes"]) for tree in plain_rounds} == {1}


def test_a_whole_answer_has_the_trees_too(showing: LLM):
    extra = {"return_speculation": True}
    [answer] = ask(showing, {**BODY, "prompt": PROMPT, "extra_body": extra})
    [choice] = answer.choices
    assert len(choice.speculation["trees"]) == choice.speculation["rounds"]


def test_an_engine_without_trees_gives_the_figures_alone(llm: LLM):
    _, rounds, last = streamed(llm, chat=False)
    assert rounds == [] and last["rounds"] > 0


def test_the_page_needs_no_key(llm: LLM):
    async def look() -> list[tuple[int, str]]:
        async with Served(llm, api_keys=("secret",)) as server, server.http() as http:
            answers = [await http.get(path) for path in ("/", "/app.js", "/style.css", "/tree.js")]
            answers.append(await http.get("/v1/models"))
            return [(one.status_code, one.headers["content-type"].split(";")[0]) for one in answers]

    kinds = ["text/html", "text/javascript", "text/css", "text/javascript"]
    assert run(look()) == [*((200, kind) for kind in kinds), (401, "application/json")]
