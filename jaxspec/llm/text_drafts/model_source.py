"""A draft model with a tokenizer of its own, as the source of text."""

import dataclasses
from collections.abc import Mapping

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.llm.text_drafts.drafter import TextSource
from jaxspec.llm.text_drafts.spelling import Spelling, Tokenizer
from jaxspec.llm.tokenizer.detokenizer import common_length


@dataclasses.dataclass
class _Asked:
    """What was asked for a request, and answered.

    Attributes:
      length: characters of the request's own text.
      spelling: of these and of the draft.
    """

    length: int
    spelling: Spelling


class ModelSource(TextSource):
    """Continues texts with the likeliest tokens of a model.

    Each round is a request to an engine of its own. What the model has read of the text before, and
    of its own draft as far as the target kept it, the engine's prefix cache has: tokens are spelt
    anew only from the last boundary that both spellings share.

    Args:
      engine: of the draft model.
      tokenizer: the draft model's.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine, self._tokenizer = engine, tokenizer
        self._around = tokenizer.encode("", special=True)
        self._asked: dict[str, _Asked] = {}

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def continue_texts(self, texts: Mapping[str, str], tokens: int) -> Mapping[str, str]:
        if self._most(tokens) < 1:
            return {}
        spellings = {name: self._spelling(name, text) for name, text in texts.items() if text}
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        generations = self.engine.add_all(
            [self._prompt(each.ids, tokens) for each in spellings.values()],
            [sampling] * len(spellings),
        )
        self.engine.finish(generations)
        drafts = {}
        for (name, spelling), generation in zip(spellings.items(), generations, strict=True):
            stops = self.engine.stop_ids(sampling)
            new = [token for token in generation.token_ids if token not in stops]
            answered = spelling.extended(self._tokenizer, new)
            self._asked[name] = _Asked(len(texts[name]), answered)
            drafts[name] = answered.text[len(texts[name]) :]
        return drafts

    def _spelling(self, request_id: str, text: str) -> Spelling:
        """The draft model's tokens for a text."""
        asked = self._asked.get(request_id)
        if asked is None:
            return Spelling.of(self._tokenizer, text, self._tokenizer.encode(text, special=False))
        known = asked.length
        if not text.startswith(asked.spelling.text[:known]):  # it has begun again
            known = common_length(asked.spelling.text[:known], text)
        return asked.spelling.of_other(self._tokenizer, text, known)

    def _prompt(self, ids: list[int], tokens: int) -> list[int]:
        """What the model reads: of a text that is too long for it, the end. That begins at the same
        place for many rounds, which then find it in the prefix cache."""
        most = self._most(tokens)
        part = max(1, most // 2)
        skipped = 0 if len(ids) <= most else -(-(len(ids) - most) // part) * part
        return [*self._around, *ids[skipped:]]

    def _most(self, tokens: int) -> int:
        """Most tokens of a text that the model reads, to continue it by so many."""
        return self.engine.limits.max_length - tokens - len(self._around)
