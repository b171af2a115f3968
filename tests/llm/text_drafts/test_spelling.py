"""Text in the tokens of several tokenizers: what continues what, and what both spellings share."""

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import jaxspec
from jaxspec.llm.text_drafts.spelling import Spelling, continuation, unfinished_tokens
from tests.helpers.small_tokenizers import byte_level, one_token_a_byte, sentencepiece_like

PIECES = [*"aeht .\n", " the", "def ", "  ", "é", "你好", "😀", "<b>", "12", "hello", " world"]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


class Plain:
    """A tokenizer of the tokenizers library, as TextTokenizer has it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)


@functools.cache
def tokenizer(name: str) -> Plain:
    if name == "built-in":
        return Plain(Tokenizer.from_file(str(jaxspec.BUILT_IN_MODEL / "tokenizer.json")))
    makers = {"bytes": one_token_a_byte, "byte level": byte_level, "words": sentencepiece_like}
    return Plain(makers[name]())


KINDS = pytest.mark.parametrize("name", ["built-in", "bytes", "byte level", "words"])


@KINDS
@settings(max_examples=60, deadline=None)
@given(before=texts, text=texts)
def test_a_continuation_spells_the_text_after_the_tokens_before(name: str, before: str, text: str):
    found = tokenizer(name)
    ids = continuation(found, before, text)
    assert found.decode([*found.encode(before), *ids]) == before + text if text else ids == []


def test_where_a_token_would_join_both_the_text_is_spelt_by_itself():
    found = tokenizer("built-in")
    assert len(found.encode(" self")) == 1, "the case needs a word of one token"
    ids = continuation(found, "return se", "lf.x")
    assert found.decode(ids) == "lf.x"
    assert ids == found.encode("lf.x")
    # Where a token ends between them, both are spelt together: a space belongs to the next word.
    assert continuation(found, "return", " self.x") == found.encode("return self.x")[1:]


@KINDS
@settings(max_examples=60, deadline=None)
@given(old=texts, draft=texts, new=texts)
def test_another_text_is_spelt_from_a_boundary_that_both_share(
    name: str, old: str, draft: str, new: str
):
    found = tokenizer(name)
    before = Spelling.of(found, old, found.encode(old)).extended(found, found.encode(draft))
    assert before.text.startswith(old)
    wanted = old + new
    after = before.of_other(found, wanted, len(old))
    assert after.text == wanted
    assert found.decode(after.ids) == wanted


def test_tokens_of_a_kept_draft_stay_as_the_model_wrote_them():
    found = tokenizer("bytes")
    letters = found.encode("as the model ")
    wrote = Spelling.of(found, "as ", letters[:3]).extended(found, letters[3:])
    assert wrote.text == "as the model "
    after = wrote.of_other(found, "as the mouse", 3)
    assert after.ids == found.encode("as the mouse")
    assert wrote.of_other(found, "as the model is", 3).ids[:12] == letters[:12]
    odd = tokenizer("built-in")  # "return" letter by letter: no encoder would do that
    slowly = [token for letter in "return" for token in odd.encode(letter)]
    kept = Spelling.of(odd, "x = 1\n", odd.encode("x = 1\n")).extended(odd, slowly)
    assert kept.of_other(odd, "x = 1\nreturn x", 6).ids[-len(slowly) - 1 : -1] == slowly


@settings(max_examples=40, deadline=None)
@given(text=texts, cut=st.integers(0, 60))
def test_tokens_within_a_character_wait_for_its_end(text: str, cut: int):
    found = tokenizer("bytes")
    ids = found.encode(text)[:cut]
    whole = ids[: len(ids) - unfinished_tokens(found, ids)]
    assert text.startswith(found.decode(whole))
    assert len(found.decode(whole).encode()) + unfinished_tokens(found, ids) == len(ids)


def test_a_tokenizer_that_changes_text_continues_none():
    class Marks(Plain):
        def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
            return f"<{super().decode(token_ids)}"

    assert continuation(Marks(byte_level()), "the quick", " brown") == []
