"""Which tokens the text of an answer consists of, with their log-probabilities."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.tokenizer.detokenizer import Detokenizer
from jaxspec.serving.chat import PreparedChat, chat_logprobs


@dataclasses.dataclass(frozen=True)
class _Token:
    entry: TokenLogprob | None  # None: it was told with an earlier part
    text: str  # that it adds to the text before it; of a part of a character, nothing


class TextTokens:
    """Finds the tokens of each part of an answer; those of markers are of none.

    Parts must be asked for in their order, and after their tokens were added.
    """

    def __init__(self, prepared: PreparedChat):
        skip = prepared.options.skip_special
        decode = functools.partial(prepared.service.llm.llm.detokenize, skip_special=skip)
        self._detokenizer = Detokenizer(decode, prepared.prompts[0])
        marks = prepared.form.reasoning
        # What may stand between parts that follow each other.
        self._between = ("\n", *(() if marks is None else marks.markers))
        self._pending: list[_Token] = []

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """The next tokens of the answer."""
        push = self._detokenizer.push
        self._pending += [_Token(entry, push([entry.token_id])) for entry in entries]

    def take(self, text: str) -> list[TokenLogprob]:
        """The tokens of the next part, whose text this is."""
        begin = self._begin(text)
        end, place, taken = begin + len(text), 0, []
        while self._pending and place < end:
            token = self._pending.pop(0)
            place += len(token.text)
            is_inside = place > begin or (place == begin and not token.text)
            if is_inside and token.entry is not None:
                taken.append(token.entry)
            if place > end:  # the next part begins in its midst
                self._pending.insert(0, _Token(None, token.text[end - place :]))
        return taken

    def _begin(self, text: str) -> int:
        """Where a part begins in what is pending."""
        pending, place = "".join(token.text for token in self._pending), 0
        while not pending.startswith(text, place):
            marker = next((m for m in self._between if pending.startswith(m, place)), None)
            if marker is None:  # a call comes before, or the text ends in a broken character
                return max(pending.find(text, place), place)
            place += len(marker)
        return place


def content_logprobs(
    prepared: PreparedChat, tokens: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Log-probabilities as they stand in the content of a response."""
    return chat_logprobs(prepared.service.texts, tokens).model_dump()["content"]


def without_bytes(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities as they stand in events."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {name: likely[name] for name in ("token", "logprob")}
                for likely in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]
