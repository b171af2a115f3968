"""SmolLM2-135M-Instruct as published: drafting changes no text."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.served import MODEL, with_client
from tests.real.published import model_file
from tests.real.smollm2 import CHATS, GREEDY, NAME, SAMPLED, UNICODE, chat, llm

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    model_file(NAME)


@functools.cache
def token_ids(drafter: str) -> list[Sequence[int]]:
    """Of greedy and of sampled chats beside each other."""
    prompts = llm(drafter).chat_prompts([chat(text) for text in CHATS[:4]]) * 2
    sampling = [GREEDY] * 4 + [SAMPLED] * 4
    return [found.token_ids for found in llm(drafter).generate(prompts, sampling)]


@functools.cache
def served(drafter: str) -> list[str]:
    """Answers of the server's chat endpoint to requests at once, greedy ones first."""
    bodies = [
        {"messages": chat(text), "max_tokens": 12, "temperature": temperature, "seed": 7}
        for temperature in (0.0, 0.8)
        for text in UNICODE
    ]

    async def ask(client: Any) -> list[Any]:
        create = client.chat.completions.create
        return await asyncio.gather(*(create(model=MODEL, **body) for body in bodies))

    answers = with_client(llm(drafter), ask, chat_template=None)
    return [answer.choices[0].message.content for answer in answers]


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "auto"])
def test_drafting_changes_no_text(drafter: str):
    """``auto`` is lookup and the head that comes with jaxspec."""
    plain = token_ids("none")
    assert token_ids(drafter) == plain
    assert plain[0] != plain[4]  # sampled rows are


def test_drafting_changes_no_answer_of_the_server():
    answers = served("none")
    assert served("auto") == answers
    assert any(not answer.isascii() for answer in answers)
    assert answers[: len(UNICODE)] != answers[len(UNICODE) :]  # sampled ones are
