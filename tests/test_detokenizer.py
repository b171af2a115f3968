"""Detokenizer: text in pieces is the whole text, whatever the tokenizer, at a linear cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxspec.detokenizer import Detokenizer
from tests.small_tokenizers import byte_level, metaspace, sentencepiece_like

PROMPTS = ["the quick brown", "hello", "the fox 😀😀😀😀", "日本"]
CONTINUATIONS = [
    " fox jumps over the dog",
    "s over  two spaces and\n\ta tab",
    " naïve café 😀 日本語 e\u0301",
    "😀😀 end",
    "本語",
    " literal \ufffd inside and at the end \ufffd",
]
MAKERS = {"bytes": byte_level, "sentencepiece": sentencepiece_like, "metaspace": metaspace}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


def decoder(tokenizer: Tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def split_tokens(tokenizer: Tokenizer, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and those that a model would continue it with."""
    first = tokenizer.encode(prompt).ids
    both = tokenizer.encode(prompt + text).ids
    same = next(
        (i for i, (a, b) in enumerate(zip(first, both, strict=False)) if a != b), len(first)
    )
    return both[:same], both[same:]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", CONTINUATIONS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_pieces_join_to_what_follows_the_prompt(tokenizer, prompt, text, size):
    before, new = split_tokens(tokenizer, prompt, text)
    decode = decoder(tokenizer)
    detokenizer = Detokenizer(decode, before)
    pieces = [
        detokenizer.push(new[start : start + size], last=start + size >= len(new))
        for start in range(0, len(new), size)
    ]
    assert decode(before) + "".join(pieces) == decode(before + new)
    assert Detokenizer(decode, before).push(new, last=True) == "".join(pieces)


def test_a_character_in_several_tokens_comes_whole(tokenizer):
    before, new = split_tokens(tokenizer, "hello", " 😀 and")
    detokenizer = Detokenizer(decoder(tokenizer), before)
    pieces = [detokenizer.push([token]) for token in new]
    assert [piece for piece in pieces if "\ufffd" in piece] == []
    assert sum("😀" in piece for piece in pieces) == 1 and "" in pieces


def test_a_character_that_the_prompt_begins_is_shown(tokenizer):
    tokens = tokenizer.encode("hello 😀 x").ids
    cut = next(
        i for i in range(len(tokens)) if tokenizer.decode(tokens[: i + 1]).endswith("\ufffd")
    )
    detokenizer = Detokenizer(decoder(tokenizer), tokens[: cut + 1])
    pieces = [detokenizer.push([token]) for token in tokens[cut + 1 :]]
    assert "".join(pieces) == "😀 x"


def test_what_is_held_back_comes_with_the_last_push(tokenizer):
    tokens = tokenizer.encode("hello 😀").ids
    detokenizer = Detokenizer(decoder(tokenizer))
    assert detokenizer.push(tokens[:-1]).endswith("\ufffd") is False
    assert detokenizer.push([], last=True).endswith("\ufffd")
    assert detokenizer.push([], last=True) == ""


def test_a_word_keeps_its_space_after_tokens_without_text():
    vocab = {0: "", 1: " a", 2: " b"}

    def decode(ids: list[int]) -> str:
        return "".join(vocab[i] for i in ids).removeprefix(" ")

    detokenizer = Detokenizer(decode, [1])
    assert "".join(detokenizer.push([token]) for token in [0] * 100 + [2]) == " b"


@given(data=st.binary(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_bytes_join_to_their_whole_text(data: bytes, sizes: list[int]):
    """With a decoder that reads bytes from left to right, as byte-level tokenizers do."""

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    detokenizer, text, rest = Detokenizer(decode), "", list(data)
    while rest:
        size = sizes[len(rest) % len(sizes)]
        text += detokenizer.push(rest[:size], last=size >= len(rest))
        rest = rest[size:]
    if "\ufffd" * 32 not in decode(list(data)):  # so much of it is not waited for
        assert text == decode(list(data))


@pytest.mark.parametrize("token", [3 + ord("a"), 3 + 0xE4], ids=["text", "broken characters"])
def test_the_cost_is_linear(token):
    tokenizer = sentencepiece_like()
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    costs = []
    for count in (500, 2000):
        decoded, detokenizer = 0, Detokenizer(decode, tokenizer.encode("hello").ids)
        ids = [token] * count
        pieces = [detokenizer.push([i]) for i in ids] + [detokenizer.push([], last=True)]
        assert len("".join(pieces)) == count
        costs.append(decoded)
    assert costs[1] <= 4.3 * costs[0] <= 4.3 * 100 * 500
