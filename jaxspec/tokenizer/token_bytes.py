"""The bytes of single tokens, which may be a part of a character."""

import json
import re

import tokenizers

_SPELT = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Tells the bytes of the tokens of a tokenizer whose decoder reads bytes.

    Attributes:
      kinds: names of the decoder's parts.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        content = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        parts = content.get("decoders", [content])
        self.kinds = frozenset(part.get("type") for part in parts)

    def of(self, token_id: int) -> bytes | None:
        """The token's bytes. None: there is no such token, or it is no bytes but text."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if "ByteLevel" in self.kinds:
            values = [_BYTES.get(character) for character in token]
            known = [value for value in values if value is not None]
            # An added token of other characters is its text.
            return bytes(known) if len(known) == len(values) else token.encode()
        spelt = _SPELT.fullmatch(token) if "ByteFallback" in self.kinds else None
        return None if spelt is None else bytes([int(spelt[1], 16)])


def _alphabet() -> dict[str, int]:
    """The byte that each character stands for in tokens of byte-level tokenizers.

    Printable characters of Latin-1 stand for themselves, and those from U+0100 on for the other
    bytes, in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _alphabet()
