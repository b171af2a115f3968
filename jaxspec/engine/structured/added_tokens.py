"""Added tokens of a tokenizer.json, and what llguidance makes of them.

llguidance takes every added token whose text is ``<...>`` as special, whatever the file says: no
string, regular expression or free text contains it. So ``<tool_call>`` of Qwen and ``<table>`` of
Gemma, which are text, would be forbidden.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple


def _letters() -> tuple[str, ...]:
    """What byte-level tokenizers write for each byte, as GPT-2's does.

    Printable characters of Latin-1 stand for themselves, and those from U+0100 on for the other
    bytes, in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


LETTERS = _letters()


class Vocabulary(NamedTuple):
    """A tokenizer for llguidance.

    Attributes:
      tokenizer_json: the tokenizer.json with plain tokens like ``<b>`` among the ordinary words.
        Ids and bytes of all tokens are as before.
      plain: the tokens that were moved: text to id. Any text may contain them.
      added: all other added tokens, special or not: text to id.
    """

    tokenizer_json: str
    plain: dict[str, int]
    added: dict[str, int]


def read_vocabulary(tokenizer_json: str, stop_token_ids: Collection[int]) -> Vocabulary:
    """Read the text of a tokenizer.json. Stop tokens are never text, whatever it says.

    Raises ValueError for what is not JSON.
    """
    content = json.loads(tokenizer_json)
    tokens = content.get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in tokens}
    vocab, spell = (content.get("model") or {}).get("vocab"), _spelling(content.get("decoder"))
    movable = {token["content"] for token in tokens if _is_movable(token, stop_token_ids)}
    if not movable or spell is None or not isinstance(vocab, dict):
        return Vocabulary(tokenizer_json, {}, ids)
    for text, number in ids.items():
        # Those that stay are words too: else the library numbers them anew, from the last word on.
        vocab.setdefault(spell(text) if text in movable else text, number)
    content["added_tokens"] = [token for token in tokens if token["content"] not in movable]
    moved = json.dumps(content, ensure_ascii=False)
    plain = {text: number for text, number in ids.items() if text in movable}
    return Vocabulary(moved, plain, {text: ids[text] for text in ids.keys() - movable})


class Markers:
    """Tokens that a text may have to contain whole: of calls, for example.

    Args:
      plain: text to id of tokens that llguidance reads as text.
      special: text to id of those that no string matches.
    """

    def __init__(self, plain: Mapping[str, int], special: Mapping[str, int]):
        self._special = frozenset(special)
        self._ids = {**plain, **special}
        self._first = {text[0] for text in self._ids}
        self._lengths = sorted({len(text) for text in self._ids}, reverse=True)

    def is_special(self, text: str) -> bool:
        """Whether the text is one token, which no string of a grammar matches."""
        return text in self._special

    def special_start(self, text: str) -> str:
        """The token that the text begins with and no string matches; empty: there is none."""
        found = self._at(text, 0)
        return found if self.is_special(found) else ""

    def token(self, text: str) -> str:
        """The token of this text, as Lark has it: ``<[id]>``."""
        return f"<[{self._ids[text]}]>"

    def literal(self, text: str) -> str:
        """A text in Lark: tokens by their ids, so that a model writes them whole, and strings."""
        pieces, end = [], 0
        for start, marker in self._found(text):
            pieces += [lark_string(text[end:start]), self.token(marker)]
            end = start + len(marker)
        pieces.append(lark_string(text[end:]))
        return " ".join(piece for piece in pieces if piece != '""')

    def mentioned(self, description: str) -> bool:
        """Whether a description of an output contains the text of such a token.

        llguidance forces what can only come next with the tokens that the tokenizer would take for
        it. A special one is then allowed and not taken, and a plain one is spelled.
        """
        bare = description.replace("\\", "")
        return any(True for text in (description, bare) for _ in self._found(text))

    def _found(self, text: str) -> Iterator[tuple[int, str]]:
        """Where tokens stand in a text, the longest first, as tokenizers find them."""
        start = 0
        while start < len(text):
            marker = self._at(text, start) if text[start] in self._first else ""
            if marker:
                yield start, marker
            start += len(marker) or 1

    def _at(self, text: str, start: int) -> str:
        pieces = (text[start : start + length] for length in self._lengths)
        return next((piece for piece in pieces if piece in self._ids), "")


def lark_string(text: str) -> str:
    """A string of Lark: written as JSON's, but DEL must be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _is_movable(token: Mapping[str, Any], stop_token_ids: Collection[int]) -> bool:
    """Whether a token is text, and llguidance's reader would take it as special."""
    looks_special = token["content"].startswith("<") and token["content"].endswith(">")
    return looks_special and not token.get("special") and token["id"] not in stop_token_ids


def _spelling(decoder: Any) -> Callable[[str], str] | None:
    """How the tokenizer's words are spelled; None: in a way that llguidance does not read."""
    kinds = json.dumps(decoder)
    if '"ByteLevel"' in kinds:
        return lambda text: "".join(LETTERS[byte] for byte in text.encode())
    if '"ByteFallback"' in kinds:
        return lambda text: text.replace(" ", "\u2581")
    return None
