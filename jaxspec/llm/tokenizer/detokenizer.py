"""Incremental detokenization for streaming. Host code, without jax or a tokenizer library."""

import copy
from collections.abc import Callable, Sequence

CONTEXT = 8  # tokens decoded together with the text after them; more if they begin in a character
MOST_PENDING = 32  # most tokens decoded again and again while the text ends in broken characters
UNFINISHED = 3  # most bytes of an unfinished character, so most tokens, and most U+FFFD
REPLACEMENT = "\ufffd"  # the decoder's output for bytes that are not, or not yet, a character


class Detokenizer:
    """Decodes tokens piece by piece. The pieces, concatenated, are the text after the context.

    Tokens are decoded together with those before them, as many tokenizers drop the space before the
    first word. An unfinished character at the end is held back, and nothing else. Only the new
    tokens and those of the last piece are decoded, so the cost is linear in the number of tokens.

    The pieces depend on the tokens alone, and not on how many are pushed together: tokens whose
    text has broken characters are added one by one. The text is then that of all tokens decoded
    together, but for invalid bytes of decoders with byte fallback: these let one invalid byte break
    all characters that are spelt in bytes beside it, even those that a stream has shown already.

    Args:
      decode: token ids to text, special tokens included.
      context: tokens before the text, such as the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()):
        self._decode = decode
        self._context, self._known, self._pending = _beginning(decode, list(context))
        text = self._text()
        finished = without_unfinished(text)
        self._told = len(finished)  # characters of the pending tokens' text that are out already
        self._length = len(text)  # characters of it, with those that are held back
        self._shown = text[self._told :]  # by the context, so it does not come again

    @property
    def held(self) -> str:
        """What is held back: U+FFFD for the bytes of an unfinished character, or nothing."""
        if not self._pending:
            return ""
        return self._without_shown(self._text()[self._told :])[0]

    def copy(self) -> "Detokenizer":
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._pending = list(self._pending)
        return other

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add, with earlier text that was held back.

        With ``last`` nothing is held back. Invalid UTF-8 becomes U+FFFD, as in the decoder.
        """
        piece = self._add(list(token_ids))
        if last and self._pending:
            piece += self._release(self._text(), last=True)
        piece, shown = self._without_shown(piece)
        self._shown = shown
        return piece

    def _add(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        self._pending += tokens
        text = self._text()
        if len(tokens) > 1 and (REPLACEMENT in text or not text or self._length):
            del self._pending[-len(tokens) :]
            return "".join([self._add([token]) for token in tokens])
        if text:
            return self._release(text)
        # Tokens without text are left out, but not a first space that the decoder drops.
        if self._known or not self._decode(2 * tokens):
            del self._pending[-1:]
        return ""

    def _text(self) -> str:
        """What the pending tokens add to the context."""
        tokens = self._context + self._pending
        text = self._decode(tokens) if tokens else ""
        same = common_length(self._known, text)
        if text.startswith(REPLACEMENT, same):
            return self._decode(self._pending)  # they may have broken the bytes before them
        return text[same:]

    def _release(self, text: str, last: bool = False) -> str:
        """The part of the pending tokens' text that is finished and not out yet."""
        # Byte fallback has a U+FFFD for each byte, so a character ends where these become fewer:
        # it is U+FFFD itself.
        ended = last or len(text) < self._length
        finished = text if ended else without_unfinished(text)
        piece, self._told, self._length = finished[self._told :], len(finished), len(text)
        if finished == text:
            self._context, self._known = self._pending, self._decode(self._pending)
            self._pending, self._told, self._length = [], 0, 0
        elif len(self._pending) > MOST_PENDING:
            held = len(text) - len(finished)
            self._context, self._known, self._pending = [], "", self._pending[-CONTEXT:]
            self._length = len(self._text())
            self._told = self._length - held
        return piece

    def _without_shown(self, piece: str) -> tuple[str, str]:
        """The piece after what the context shows, and what of that may still come."""
        same = common_length(self._shown, piece)
        return piece[same:], self._shown[same:] if same == len(piece) else ""


def _beginning(
    decode: Callable[[list[int]], str], context: list[int]
) -> tuple[list[int], str, list[int]]:
    """The last tokens of the context, their text, and after them those that begin a character."""
    for size in range(min(UNFINISHED, len(context)) + 1):
        end = len(context) - size
        tokens, text = _last_tokens(decode, context[:end])
        if not text.endswith(REPLACEMENT):
            return tokens, text, context[end:]
    return [], "", context[-CONTEXT:]  # its end is invalid, or its tokens end amid characters


def _last_tokens(decode: Callable[[list[int]], str], context: list[int]) -> tuple[list[int], str]:
    """The last tokens of the context and their text; they begin at a character if possible."""
    size = CONTEXT
    while True:
        tokens = context[-size:]
        text = decode(tokens) if tokens else ""
        if not text.startswith(REPLACEMENT) or size >= len(context):
            return tokens, text
        size *= 2


def without_unfinished(text: str) -> str:
    """The text without the U+FFFD at its end that an unfinished character may have."""
    return text[: max(len(text.rstrip(REPLACEMENT)), len(text) - UNFINISHED)]


def common_length(first: str, second: str) -> int:
    """Number of characters at the beginning that are the same."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (mine, its) in pairs if mine != its), len(second))


class StopStrings:
    """Finds where a text ends that grows piece by piece.

    The end of the text that may be the beginning of a stop string is held back. With ``keep`` the
    text includes the stop string that ends it.

    Attributes:
      found: the string that has ended the text; None: none so far.
    """

    def __init__(self, strings: Sequence[str], *, keep: bool = False):
        self._strings, self._keep = tuple(strings), keep
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str, *, search: bool = True) -> str:
        """The text that is known to come before any stop string, with what was held back.

        With ``search`` False, stop strings that are complete in this piece do not count.
        """
        text = self._held + piece
        strings = self._strings if search else ()
        places = [(text.find(string), len(string), string) for string in strings]
        places = [found for found in places if found[0] >= 0]
        if places:
            place, length, self.found = min(places)
            self._held = ""
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
