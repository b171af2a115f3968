"""SmolLM2-135M-Instruct as published: what transformers computes, with and without drafting."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import transformers

from jaxspec import LLM, SamplingParams
from jaxspec.config.engine import EngineConfig
from tests.helpers.engines import seal
from tests.helpers.served import MODEL, with_client
from tests.real.published import check_completions, model_file

pytestmark = pytest.mark.real

NAME = "smollm2"
CHATS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Say hello in French, German and Japanese, with an emoji for each.",
    "Translate into Spanish: naïve café owners don't sleep.",
    "List three uses of copper.",
    "What is 12 times 12?",
    "Summarize: the river was high, the bridge was closed, and the school stayed empty.",
    "Repeat exactly: naïve café, 你好, 😀, Straße, здравствуй",
]
RAW = [
    "def fibonacci(n):\n",
    "Ein Mann geht in eine Bar und",
    '{"name": "Ada", "born": 1815, "known for": [',
    "naïve 你好 😀 means",
    "1, 1, 2, 3, 5, 8,",
    "<h1>Title</h1>\n<p>",
    "SELECT name FROM cities WHERE",
    "To be, or not to be",
]
UNICODE = [
    CHATS[-1],
    "Say hello in Japanese, Russian and Greek, in their own letters.",
]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=7)
ROWS = 8
SCORED = dataclasses.replace(GREEDY, prompt_logprobs=5)


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    model_file(NAME)


@functools.cache
def llm(drafter: str) -> LLM:
    """Few programs, which are compiled: they serve all requests of these tests."""
    engine = EngineConfig(max_rows=ROWS, rounds_per_call=8)
    made = LLM(NAME, drafter=drafter, dtype="float32", max_length=256, engine=engine)
    scored = 5 if drafter == "none" else None
    seal(made.engine, dataclasses.replace(SAMPLED, prompt_logprobs=scored), prompt_tokens=64)
    return made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


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


def test_texts_and_log_probabilities_are_those_of_transformers_reading_of_the_file():
    prompts = [*RAW, *llm("none").chat_prompts([chat(text) for text in CHATS])]
    check_completions(NAME, llm("none").generate(prompts, SCORED))


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


def test_words_are_those_of_transformers_reading_of_the_file():
    path = model_file(NAME)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = llm("none").tokenizer
    for text in (*CHATS, *RAW, *UNICODE, " 1234.5  \n\n\tx", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template
