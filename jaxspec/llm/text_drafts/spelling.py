"""Text as tokens that continue others, in any tokenizer. Pure functions of text and token ids."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from jaxspec.llm.tokenizer.detokenizer import REPLACEMENT, UNFINISHED, common_length

CONTEXT = 24  # characters before a text that are spelt with it, at least
MOST_CONTEXT = 48
ANCHORS = ("\n", ".", "a")  # after which a text is spelt by itself; few tokens join with both
TAIL = 24  # last tokens of a spelling whose boundaries are known
WORD = 8  # of these, how many are given up for a boundary before a space


class Tokenizer(Protocol):
    """What is needed of a tokenizer; see TextTokenizer."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str: ...


def continuation(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The tokens of ``text`` as the tokenizer spells it after ``before``.

    Where it would join the end of ``before`` and the beginning of ``text`` in a token, the text is
    spelt by itself: who wrote ``before`` has ended a token there. Empty if the tokenizer does not
    keep text as it is.
    """
    for anchor in (before, *ANCHORS):
        ids = joint(tokenizer, anchor, text)
        if ids is not None:
            return ids
    return []


def joint(tokenizer: Tokenizer, before: str, text: str) -> list[int] | None:
    """The tokens of ``text`` where both are spelt together; None: no token begins there."""
    anchor = _context(before)
    ids = tokenizer.encode(anchor + text, special=False) if text else []
    end = _end_of(tokenizer, ids, anchor) if text else 0
    return None if end is None else ids[end:]


def _context(before: str) -> str:
    """The end of a text, from a space on if there is one near: words are spelt as a whole."""
    if len(before) <= CONTEXT:
        return before
    far = before[-MOST_CONTEXT:-CONTEXT]
    space = max(far.rfind(" "), far.rfind("\n"))
    return before[-CONTEXT:] if space < 0 else far[space:] + before[-CONTEXT:]


def _end_of(tokenizer: Tokenizer, ids: list[int], text: str) -> int | None:
    """How many of these tokens spell just this text; None: none of them ends there."""
    for end in range(len(ids) + 1):
        found = tokenizer.decode(ids[:end]) if end else ""
        if found == text:
            return end
        if len(found) > len(text):
            return None
    return None


def unfinished_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many of the last tokens begin a character that they do not end.

    0 for bytes that can be no character: more tokens do not mend them.
    """
    for size in range(min(UNFINISHED, len(ids)) + 1):
        end = len(ids) - size
        if not tokenizer.decode(ids[max(0, end - TAIL) : end]).endswith(REPLACEMENT):
            return size
    return 0


class Spelling(NamedTuple):
    """A text, and tokens for it.

    Attributes:
      ends: how many tokens spell the first so many characters, of which there are those of the last
        tokens that end with a whole one.
    """

    text: str
    ids: list[int]
    ends: dict[int, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str, ids: list[int]) -> Self:
        """``ids`` spell the text."""
        first = max(0, len(ids) - TAIL)
        while first > 0 and tokenizer.decode(ids[first:]).startswith(REPLACEMENT):
            first -= 1  # it is amid a character
        tail, ends = tokenizer.decode(ids[first:]) if ids else "", dict[int, int]()
        start = len(text) - len(tail)
        if not text.endswith(tail) or (start > 0) != (first > 0):
            return cls(text, ids, {})
        # A decoder may drop the tail's first space: what ends before that is not counted.
        for end in range(first + (first > 0), len(ids) + 1):
            part = tokenizer.decode(ids[first:end]) if end > first else ""
            if tail.startswith(part) and not part.endswith(REPLACEMENT):
                ends.setdefault(start + len(part), end)  # of tokens without text the first
        return cls(text, ids, ends)

    def extended(self, tokenizer: Tokenizer, ids: list[int]) -> "Spelling":
        """With further tokens, without those at the end that do not end a character."""
        ids = ids[: len(ids) - unfinished_tokens(tokenizer, [*self.ids, *ids])]
        known = self.ids[-TAIL:]
        before = tokenizer.decode(known) if known else ""
        added = tokenizer.decode([*known, *ids])[len(before) :] if ids else ""
        return Spelling.of(tokenizer, self.text + added, [*self.ids, *ids])

    def of_other(self, tokenizer: Tokenizer, text: str, known: int) -> "Spelling":
        """A spelling of another text, with the first tokens of this one as far as they are both's.

        They are kept up to the end of a word, if one is near, so that a word that was cut, or ends
        otherwise, is spelt anew. ``known``: characters with which both begin, at least.
        """
        same = known + common_length(self.text[known:], text[known:])
        near = [place for place in self.ends if place <= same][-WORD:]
        words = [place for place in near if text[place : place + 1] in ("", " ", "\n")]
        for place in [*reversed(words), *reversed(near)]:
            ids = joint(tokenizer, text[:place], text[place:])
            if ids is not None:
                return Spelling.of(tokenizer, text, [*self.ids[: self.ends[place]], *ids])
        return Spelling.of(tokenizer, text, tokenizer.encode(text, special=False))
