"""A drafter on the host whose drafts are text."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxspec.engine.host_drafter import HostDrafter
from jaxspec.llm.text_drafts.spelling import Tokenizer, continuation, unfinished_tokens
from jaxspec.llm.tokenizer.detokenizer import Detokenizer


class TextSource(Protocol):
    """What continues texts."""

    @property
    def is_ready(self) -> bool:
        """Whether it may be asked now."""
        return True

    def continue_texts(self, texts: Mapping[str, str], tokens: int) -> Mapping[str, str]:
        """What may follow each text, by request id: about so many tokens, or less, or nothing."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""


@dataclasses.dataclass
class _Text:
    """The text of a request: of its first tokens, of which the last ends a character."""

    tokens: list[int]
    text: str
    detokenizer: Detokenizer


class TextDrafter(HostDrafter):
    """Drafts what a source of text writes, in the target's tokens.

    A draft depends on the text alone. So source and target need not share a tokenizer. What of it
    is accepted, the target says.

    Args:
      tokenizer: the target's.
      vocab_size: the target's; tokens past it are not drafted.
    """

    def __init__(self, tokenizer: Tokenizer, source: TextSource, vocab_size: int):
        self._tokenizer, self.source, self._vocab_size = tokenizer, source, vocab_size
        self._around = tokenizer.encode("", special=True)  # such as <bos>, which is no text
        self._texts: dict[str, _Text] = {}

    @property
    def is_ready(self) -> bool:
        return self.source.is_ready

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self.source.forget(request_id)

    def draft(self, texts: Mapping[str, Sequence[int]], most: int) -> Mapping[str, Sequence[int]]:
        known = {name: self._known(name, list(tokens)) for name, tokens in texts.items()}
        drafts = self.source.continue_texts({name: each.text for name, each in known.items()}, most)
        return {
            name: self._tokens(known[name], texts[name], draft)[:most]
            for name, draft in drafts.items()
        }

    def _known(self, request_id: str, tokens: list[int]) -> _Text:
        """The text of the tokens, without those at the end that begin a character."""
        whole = tokens[: len(tokens) - unfinished_tokens(self._tokenizer, tokens)]
        known = self._texts.get(request_id)
        if known is None or whole[: len(known.tokens)] != known.tokens:  # it may have begun again
            around = self._around
            begin = len(around) if around and whole[: len(around)] == around else 0
            text = self._tokenizer.decode(whole[begin:]) if whole[begin:] else ""
            known = _Text(whole, text, Detokenizer(self._tokenizer.decode, whole))
        elif len(whole) > len(known.tokens):
            known.text += known.detokenizer.push(whole[len(known.tokens) :])
            known.tokens = whole
        self._texts[request_id] = known
        return known

    def _tokens(self, known: _Text, tokens: Sequence[int], draft: str) -> list[int]:
        """The draft in the target's tokens, after those that begin its first character."""
        begun = list(tokens[len(known.tokens) :])
        ids = continuation(self._tokenizer, known.text, draft)
        if ids[: len(begun)] != begun:
            return []  # another character, or other tokens for its bytes
        ids = ids[len(begun) :]
        legal = (place for place, token in enumerate(ids) if token >= self._vocab_size)
        return ids[: next(legal, len(ids))]
