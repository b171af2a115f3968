"""The bytes of single tokens, which may be a part of a character."""

import json
import re

import tokenizers

from jaxspec.engine.structured.added_tokens import LETTERS

_BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}
_SPELT = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Tells the bytes of the tokens of a tokenizer whose decoder reads bytes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        content = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        parts = content.get("decoders", [content])
        self._kinds = frozenset(part.get("type") for part in parts)

    def of(self, token_id: int) -> bytes | None:
        """The token's bytes. None: there is no such token, or it is no bytes but text."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if "ByteLevel" in self._kinds:
            values = [_BYTES.get(character) for character in token]
            known = [value for value in values if value is not None]
            # An added token of other characters is its text.
            return bytes(known) if len(known) == len(values) else token.encode()
        spelt = _SPELT.fullmatch(token) if "ByteFallback" in self._kinds else None
        return None if spelt is None else bytes([int(spelt[1], 16)])
