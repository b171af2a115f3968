"""Detokenizer: text in pieces is the whole text, whatever the tokenizer, at a linear cost."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxspec.llm.tokenizer.detokenizer import Detokenizer, common_length
from tests.helpers.small_tokenizers import byte_level, metaspace, sentencepiece_like

PROMPTS = ["the quick brown", "hello", "the fox 😀😀😀😀", "日本"]
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


SIZES = st.lists(st.one_of(st.integers(1, 5), st.integers(30, 100)), min_size=1, max_size=8)
SCRIPTS = st.text(st.sampled_from("aé \n\t’“жÜ日本語한글नमस्तेمرحبا😀👩🏽‍🚀🇩🇪\ufffd"), max_size=60)


def pushed(detokenizer: Detokenizer, tokens: list[int], sizes: list[int]) -> list[str]:
    """The pieces of pushes of these sizes, which repeat."""
    pieces, start = [], 0
    for size in itertools.cycle(sizes):
        end = start + size
        pieces.append(detokenizer.push(tokens[start:end], last=end >= len(tokens)))
        if end >= len(tokens):
            return pieces
        start = end
    raise AssertionError("cycle ended")


@given(
    before=st.lists(st.binary(min_size=1, max_size=5), max_size=12),
    after=st.lists(st.one_of(st.binary(min_size=1, max_size=5), SCRIPTS.map(str.encode))),
    sizes=SIZES,
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_join_to_their_whole_text(before, after, sizes):
    """Of a decoder that reads bytes from left to right, as byte-level tokenizers do. Tokens are any
    bytes, so they may end a character and begin another."""
    words = [*before, *after]

    def decode(ids: list[int]) -> str:
        return b"".join(words[token] for token in ids).decode(errors="replace")

    first, new = list(range(len(before))), list(range(len(before), len(words)))
    text = "".join(pushed(Detokenizer(decode, first), new, sizes))
    assert decode(first) + text == whole_after(decode, first, new)


def whole_after(decode: Callable[[list[int]], str], first: list[int], new: list[int]) -> str:
    """The text of all, after that of the first as it was shown: the bytes of a character which they
    begin stay U+FFFD there."""
    shown, whole = decode(first), decode([*first, *new])
    return shown + whole[common_length(shown, whole) :]


@given(text=SCRIPTS, before=st.sampled_from(PROMPTS), sizes=SIZES)
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_split_of_a_text_of_any_script_joins_to_it(tokenizer, text, before, sizes):
    first, new = split_tokens(tokenizer, before, text)
    decode = decoder(tokenizer)
    pieces = pushed(Detokenizer(decode, first), new, sizes)
    assert "".join(pieces) == whole_after(decode, first, new).removeprefix(decode(first))
    if "\ufffd" not in before + text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(seed=st.integers(0, 2**32 - 1), sizes=SIZES, data=st.data())
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_text_of_any_tokens_does_not_depend_on_the_split(tokenizer, seed, sizes, data):
    """Broken characters beside whole ones, special tokens and spaces too."""
    generator = random.Random(seed)
    spelt = [i for i in range(tokenizer.get_vocab_size()) if "\ufffd" in tokenizer.decode([i])]
    count = data.draw(st.integers(0, 100))
    tokens = [
        generator.choice(spelt)
        if generator.random() < 0.7
        else generator.randrange(tokenizer.get_vocab_size())
        for _ in range(count)
    ]
    cut = data.draw(st.integers(0, min(count, 12)))
    for skip in (False, True):

        def decode(ids: list[int], skip: bool = skip) -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip)

        first, new = tokens[:cut], tokens[cut:]
        joined = {
            "".join(pushed(Detokenizer(decode, first), new, one))
            for one in (sizes, [1], [count + 1])
        }
        assert len(joined) == 1
        if tokenizer.get_vocab_size() == 320:  # the byte-level one: its whole text is that, too
            assert joined == {whole_after(decode, first, new).removeprefix(decode(first))}


@pytest.mark.parametrize("cut", [34, 35, 37, 42, 59])
def test_a_long_run_of_broken_bytes_does_not_depend_on_the_split(cut):
    """One invalid byte breaks the characters after it, until more are pending than are kept."""
    tokenizer = sentencepiece_like()
    decode = decoder(tokenizer)
    texts = ["’’’’éé日’éé日日’’’’日日’", "日日é’日é日’é日’日é’日日’日é’"]
    for spelt in (*(text.encode() for text in texts), *(b"\x99" + t.encode() for t in texts)):
        tokens = [3 + byte for byte in b"\xe2" + spelt]
        whole = "".join(pushed(Detokenizer(decode), tokens, [1]))
        assert "".join(pushed(Detokenizer(decode), tokens, [cut, 2, 3, 1])) == whole


@pytest.mark.parametrize("size", [1, 31, 32, 33, 34, 47, 1000])
def test_the_unfinished_character_alone_is_held_back(tokenizer, size):
    """However many tokens come together; invalid bytes come once they cannot be one any more."""
    text = "’" * 16 + "😀" * 10
    tokens = tokenizer.encode(text).ids
    decode = decoder(tokenizer)
    detokenizer, known = Detokenizer(decode), ""
    for start in range(0, len(tokens), size):
        known += detokenizer.push(tokens[start : start + size])
        whole = decode(tokens[: start + size])
        if not whole.endswith("\ufffd"):
            assert known == whole and detokenizer.held == ""
        else:
            assert set(detokenizer.held) == {"\ufffd"} and len(detokenizer.held) <= 3
        assert decode(tokens).startswith(known)
    broken = tokenizer.encode("😀").ids[-1]
    assert len(detokenizer.push([broken] * 40)) >= 37
    assert detokenizer.push([], last=True).endswith("\ufffd") and detokenizer.held == ""


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
