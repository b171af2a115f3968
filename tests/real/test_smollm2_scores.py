"""SmolLM2-135M-Instruct as published: what transformers computes, and how it reads words."""

import dataclasses

import pytest
import transformers

from tests.real.published import check_completions, model_file
from tests.real.smollm2 import CHATS, GREEDY, NAME, RAW, UNICODE, chat, llm

pytestmark = pytest.mark.real

SCORED = dataclasses.replace(GREEDY, prompt_logprobs=5)


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    model_file(NAME)


def test_texts_and_log_probabilities_are_those_of_transformers_reading_of_the_file():
    chats = llm("none", 5).chat_prompts([chat(text) for text in CHATS[1::2]])
    prompts = [*RAW[::2], *chats]  # a row for each: more of them take longer, in transformers too
    check_completions(NAME, llm("none", 5).generate(prompts, SCORED))


def test_words_are_those_of_transformers_reading_of_the_file():
    path = model_file(NAME)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = llm("none", 5).tokenizer
    for text in (*CHATS, *RAW, *UNICODE, " 1234.5  \n\n\tx", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template
