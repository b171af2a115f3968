"""Reasoning in chats: where it begins, its tokens, and how many an answer has."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.structured_output import Reasoning, StructuredOutput
from jaxspec.llm.llm import LLM
from jaxspec.serving.answer_parser import AnswerForm, AnswerParser
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.reasoning import ReasoningFormat

MOST_MARKER_TOKENS = 64  # at the end of a prompt: of a marker, and white space after it


@dataclasses.dataclass(frozen=True)
class ChatReasoning:
    """How the answer to a chat reasons.

    Attributes:
      inside: whether the answer begins within reasoning.
      closed: whether the prompt ends the reasoning, before the answer begins.
      begin, end: the tokens of the markers.
      begins: the tokens that an answer begins with which reasons: a line break may come first.
      hidden: whether a text without special tokens lacks a marker.
    """

    form: ReasoningFormat
    inside: bool
    closed: bool
    begin: tuple[int, ...]
    end: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...]
    hidden: bool

    def before(self, structured: StructuredOutput, calls: bool) -> StructuredOutput:
        """A structured output that begins after the reasoning; see Reasoning.

        ``calls``: whether the marker of a call, too, ends the reasoning.
        """
        if self.closed:
            return structured
        form = self.form
        reasoning = Reasoning(
            form.begin,
            form.end,
            self.inside,
            optional=calls,
            dropped=form.dropped,
            begin_ids=self.begins,
            end_id=self.end[0] if len(self.end) == 1 and not calls else None,
        )
        return dataclasses.replace(structured, reasoning=reasoning)

    def budget(self, tokens: int) -> ReasoningBudget | None:
        """The budget of so many tokens; None: the prompt has ended the reasoning."""
        if self.closed:
            return None
        begin = () if self.inside and not self.form.repeats else self.begin
        return ReasoningBudget(tokens, self.end, begin, self.inside, self.form.repeats)


def chat_reasoning(
    llm: LLM, form: ReasoningFormat, request: ChatRequest, prompt: Sequence[int]
) -> ChatReasoning:
    """How the answer to a request reasons, whose prompt this is."""
    texts = (form.begin, form.end, f"\n{form.begin}")
    begin, end, after_line = map(tuple, llm.tokenize(texts, special=False))
    added: Mapping[int, Any] = llm.tokenizer.added_tokens_decoder
    hidden = any(token in added and added[token].special for token in (*begin, *end))
    tail = llm.detokenize(prompt[-MOST_MARKER_TOKENS:]).rstrip()
    inside, closed = tail.endswith(form.begin), tail.endswith(form.end)
    if request.continue_final_message:  # which may end anywhere
        text = str(request.messages[-1].get("content") or "")
        inside, closed = text.rfind(form.begin) > text.rfind(form.end), form.end in text
    closed = closed and not inside
    return ChatReasoning(form, inside, closed, begin, end, (begin, after_line), hidden)


def reasoning_budget(
    reasoning: ChatReasoning | None, request: ChatRequest, structured: StructuredOutput | None
) -> ReasoningBudget | None:
    """The budget that a request asks for. Raises FieldError for two, if nothing reasons, and for a
    grammar that holds the reasoning: it may forbid the end where the budget wants it."""
    names = ("thinking_token_budget", "max_thinking_tokens")
    given = {name: tokens for name in names if (tokens := getattr(request, name)) is not None}
    if len(given) > 1:
        raise FieldError(names[1], f"give {' or '.join(names)}")
    for name, tokens in given.items():
        if tokens < 0:
            return None
        if reasoning is None:
            raise FieldError(name, f"{name} needs a model that reasons; see --reasoning-format")
        if structured is not None and structured.trigger is None and len(reasoning.end) > 1:
            problem = "needs a model whose reasoning ends with one token, beside structured output"
            raise FieldError(name, f"{name} {problem}")
        try:
            return reasoning.budget(tokens)
        except ValueError as error:  # a marker of too many tokens
            raise FieldError(name, f"{name}: {error}") from error
    return None


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
