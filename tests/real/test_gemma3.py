"""Gemma 3 270M as published, from a file of five types of tensors."""

import pytest

from jaxspec import LLM, SamplingParams
from tests.real.published import check_completions, model_file

pytestmark = pytest.mark.real

NAME = "gemma3-270m"
RAW = ["The capital of France is", "def fibonacci(n):\n", "naïve 你好 😀 means"]


def test_texts_and_log_probabilities_are_those_of_transformers_reading_of_the_file():
    model_file(NAME)
    llm = LLM(NAME, drafter="none", dtype="float32", max_length=64)
    params = SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=5)
    check_completions(NAME, llm.generate(RAW, params))
