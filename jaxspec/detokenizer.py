"""Incremental detokenization for streaming. Host code, without jax or a tokenizer library."""

from collections.abc import Callable, Sequence

CONTEXT = 8  # tokens decoded together with the text after them; more if they begin in a character
MOST_PENDING = 32  # most tokens held back; a character has at most four bytes, so they are invalid
REPLACEMENT = "\ufffd"  # the decoder's output for bytes that are not, or not yet, a character


class Detokenizer:
    """Decodes tokens piece by piece. The pieces, concatenated, are the text after the context.

    Tokens are decoded together with those before them, as many tokenizers drop the space before the
    first word. A piece that ends inside a character is held back. Only the new tokens and those of
    the last piece are decoded, so the cost is linear in the number of tokens.

    Args:
      decode: token ids to text, special tokens included.
      context: tokens before the text, such as the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()):
        self._decode = decode
        self._context, self._known = _beginning(decode, list(context))
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add, with earlier text that was held back.

        With ``last`` nothing is held back. Invalid UTF-8 becomes U+FFFD, as in the decoder.
        """
        self._pending += token_ids
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        # The known text is a prefix of it, unless the context starts inside a character.
        piece = text[common_length(self._known, text) :]
        incomplete = not piece or piece.endswith(REPLACEMENT)
        if incomplete and not last and len(self._pending) < MOST_PENDING:
            return ""
        if piece:  # tokens without text cannot be the context: the next word would lose its space
            self._context, self._known = self._pending, self._decode(self._pending)
        self._pending = []
        return piece


def _beginning(decode: Callable[[list[int]], str], context: list[int]) -> tuple[list[int], str]:
    """The last tokens of the context and their text; they begin at a character if possible."""
    size = CONTEXT
    while True:
        tokens = context[-size:]
        text = decode(tokens) if tokens else ""
        if not text.startswith(REPLACEMENT) or size >= len(context):
            return tokens, text
        size *= 2


def common_length(first: str, second: str) -> int:
    """Number of characters at the beginning that are the same."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(second))


class StopStrings:
    """Finds where a text ends that grows piece by piece.

    The end of the text that may be the beginning of a stop string is held back. With ``keep`` the
    text includes the stop string that ends it.
    """

    def __init__(self, strings: Sequence[str], *, keep: bool = False):
        self._strings, self._keep = tuple(strings), keep
        self._held = ""
        self.found = False

    def push(self, piece: str, *, search: bool = True) -> str:
        """The text that is known to come before any stop string, with what was held back.

        With ``search`` False, stop strings that are complete in this piece do not count.
        """
        text = self._held + piece
        strings = self._strings if search else ()
        places = [(text.find(string), len(string)) for string in strings]
        places = [(place, length) for place, length in places if place >= 0]
        if places:
            self.found, self._held = True, ""
            place, length = min(places)
            return text[: place + length * self._keep]
        keep = max((overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, as no text follows."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, string: str) -> int:
    """Characters at the end of the text that begin the string, not all of it."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)
