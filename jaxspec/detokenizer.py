"""Text of tokens as they come. Host code: it knows no model, no tokenizer library and no jax."""

from collections.abc import Callable, Sequence

CONTEXT = 8  # tokens before the text that are decoded with it, or more if they cut a character
MOST_PENDING = 32  # tokens that are held back; a character has at most four, so these are broken
REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are no character, or not yet


class Detokenizer:
    """Decodes tokens piece by piece. The pieces, joined, are the text that follows the context.

    Tokens are decoded beside those before them: many tokenizers drop the space before the first
    word. A piece that ends inside a character is held back. Only tokens since the last piece and
    those of that piece are decoded again, so the cost is linear in the number of tokens.

    Args:
      decode: token ids to text, special tokens included.
      context: tokens before the text, such as the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()):
        self._decode = decode
        self._context, self._known = _beginning(decode, list(context))
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add, with what was held back; all of it if they are the last.

        Bytes that are no UTF-8 become U+FFFD, as many as the decoder makes of the tokens at hand.
        """
        self._pending += token_ids
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        # The known text is a prefix of it, unless the context starts inside a character.
        piece = text[_common_length(self._known, text) :]
        incomplete = not piece or piece.endswith(REPLACEMENT)
        if incomplete and not last and len(self._pending) < MOST_PENDING:
            return ""
        if piece:  # tokens without text stay no context: the next word would lose its space
            self._context, self._known = self._pending, self._decode(self._pending)
        self._pending = []
        return piece


def _beginning(decode: Callable[[list[int]], str], context: list[int]) -> tuple[list[int], str]:
    """The last tokens of the context, from a whole character on if there is one, and their text."""
    size = CONTEXT
    while True:
        tokens = context[-size:]
        text = decode(tokens) if tokens else ""
        if not text.startswith(REPLACEMENT) or size >= len(context):
            return tokens, text
        size *= 2


def _common_length(first: str, second: str) -> int:
    """Number of characters at the beginning that are the same."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(second))
