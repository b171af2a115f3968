"""Reasoning in chats: where it begins, its tokens, and how many an answer has."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.llm.llm import LLM
from jaxspec.serving.answer_parser import AnswerForm, AnswerParser
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.reasoning import ReasoningFormat

MOST_MARKER_TOKENS = 64  # at the end of a prompt: of a marker, and white space after it


@dataclasses.dataclass(frozen=True)
class ChatReasoning:
    """How the answer to a chat reasons.

    Attributes:
      inside: whether the answer begins within reasoning.
      begin, end: the tokens of the markers.
      hidden: whether a text without special tokens lacks a marker.
    """

    form: ReasoningFormat
    inside: bool
    begin: tuple[int, ...]
    end: tuple[int, ...]
    hidden: bool


def chat_reasoning(
    llm: LLM, form: ReasoningFormat, request: ChatRequest, prompt: Sequence[int]
) -> ChatReasoning:
    """How the answer to a request reasons, whose prompt this is."""
    [begin, end] = llm.tokenize([form.begin, form.end], special=False)
    added: Mapping[int, Any] = llm.tokenizer.added_tokens_decoder
    hidden = any(token in added and added[token].special for token in (*begin, *end))
    inside = _is_inside(llm.detokenize(prompt[-MOST_MARKER_TOKENS:]), form, request)
    return ChatReasoning(form, inside, tuple(begin), tuple(end), hidden)


def _is_inside(tail: str, form: ReasoningFormat, request: ChatRequest) -> bool:
    """Whether the prompt, which ends with ``tail``, ends within reasoning."""
    if request.continue_final_message:
        text = str(request.messages[-1].get("content") or "")
        return text.rfind(form.begin) > text.rfind(form.end)
    return tail.rstrip().endswith(form.begin)


def reasoning_tokens(
    reasoning: ChatReasoning,
    form: AnswerForm,
    token_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
) -> int:
    """How many tokens of an answer are reasoning, without its markers."""
    form = dataclasses.replace(form, reasoning=reasoning.form, inside=reasoning.inside)
    if _has(token_ids, reasoning.end):
        return _between(reasoning, token_ids)

    def characters(count: int) -> int:
        parts = AnswerParser(form).push(decode(token_ids[:count]), last=True)
        return sum(len(part.text) for part in parts if part.reasoning)

    counts, total = range(len(token_ids) + 1), characters(len(token_ids))
    if not total:
        return 0
    first = bisect.bisect_left(counts, 1, key=characters)
    return bisect.bisect_left(counts, total, key=characters) - first + 1


def _has(token_ids: Sequence[int], marker: tuple[int, ...]) -> bool:
    starts = (place for place, token in enumerate(token_ids) if token == marker[0])
    return any(tuple(token_ids[place : place + len(marker)]) == marker for place in starts)


def _between(reasoning: ChatReasoning, token_ids: Sequence[int]) -> int:
    """Tokens between the markers' tokens."""
    count, place, inside = 0, 0, reasoning.inside
    while place < len(token_ids):
        marker = reasoning.end if inside else reasoning.begin
        if tuple(token_ids[place : place + len(marker)]) == marker:
            if inside and not reasoning.form.repeats:
                return count
            inside, place = not inside, place + len(marker)
        else:
            count, place = count + inside, place + 1
    return count
