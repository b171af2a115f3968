"""SmolLM2-135M-Instruct as published, in engines of few programs, and texts for it."""

import dataclasses
import functools

from jaxspec import LLM, SamplingParams
from jaxspec.config.engine import EngineConfig
from tests.helpers.engines import seal

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


@functools.cache
def llm(drafter: str, scored: int | None = None) -> LLM:
    """Few programs, which are compiled: they serve all requests of a file of tests. ``scored``: how
    many log-probabilities of each token of their prompts."""
    engine = EngineConfig(max_rows=ROWS, rounds_per_call=8)
    target = None if drafter == "none" else llm("none", scored).params.target  # read once
    made = LLM(NAME, drafter, dtype="float32", max_length=256, engine=engine, target=target)
    seal(made.engine, dataclasses.replace(SAMPLED, prompt_logprobs=scored), prompt_tokens=64)
    return made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
