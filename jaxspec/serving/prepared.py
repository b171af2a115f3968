"""Requests that are ready for the engine, and their answers: whole, or in chunks."""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion, TextChunk, TextOptions
from jaxspec.llm.tree_text import RoundTexts
from jaxspec.serving import results
from jaxspec.serving.protocol.sampling import (
    Choice,
    GeneratedResponse,
    SamplingFields,
    Speculation,
    Usage,
)
from jaxspec.serving.service import Service


@dataclasses.dataclass(frozen=True)
class PreparedRequest[R: SamplingFields, C: Choice, A: GeneratedResponse](abc.ABC):
    """A request, ready for the engine: token ids and sampling of each prompt."""

    operation: ClassVar[str]  # as the conventions of OpenTelemetry call it

    request: R
    service: Service
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    options: TextOptions
    id: str
    created: int = dataclasses.field(default_factory=results.now, kw_only=True)

    @property
    def samples(self) -> int:
        """The number of choices of a prompt."""
        return self.sampling[0].n

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[index // self.samples]

    def rounds_of(self, index: int) -> RoundTexts:
        """The trees of a choice's rounds as JSON."""
        return RoundTexts(self.service.llm.llm.detokenize, self.prompt_of(index))

    def text_logprobs(
        self, entries: Sequence[TokenLogprob], token_ids: Sequence[int]
    ) -> Sequence[TokenLogprob]:
        """The entries that are shown: a stop token that ends the text is no part of it."""
        stops = self.service.llm.llm.engine.stop_ids(self.sampling[0])
        return entries[:-1] if token_ids and token_ids[-1] in stops else entries

    def stop_reason(self, completion: Completion) -> str | int | None:
        """What has ended a text, if it is of the request: a stop string, or one of its tokens."""
        if completion.finish_reason != "stop" or completion.stop_string is not None:
            return completion.stop_string
        service, last = self.service, completion.token_ids[-1:]
        of_model = {*service.llm.llm.params.target.config.stop_token_ids, *service.turn_end()}
        asked = set(self.request.stop_token_ids or ()) - of_model
        return next((token for token in last if token in asked), None)

    def kept(self, completion: Completion) -> Completion:
        """What is answered of what the engine wrote."""
        return completion

    def usage(self, completions: Sequence[Completion]) -> Usage:
        """The tokens of the request."""
        return results.usage(completions, self.samples)

    def add_asked(self, choice: C, completion: Completion) -> None:
        """Add to a whole choice what it has beside the text, and what the request asks for."""
        request = self.request
        choice.stop_reason = self.stop_reason(completion)
        if request.prompt_logprobs is not None and completion.prompt_logprobs is not None:
            choice.prompt_logprobs = self.service.texts.prompt_logprobs(completion.prompt_logprobs)
        choice.policy_logprobs = completion.policy_logprobs
        if request.return_token_ids:
            choice.token_ids = completion.token_ids
            choice.prompt_token_ids = completion.prompt_token_ids
        if request.return_speculation:
            choice.speculation = results.speculation(completion)
            if completion.trees is not None:
                choice.speculation.trees = self.rounds_of(choice.index).add(completion.trees)

    @abc.abstractmethod
    def response(self, choices: list[C], version: int, *, chunk: bool = False) -> A:
        """The answer, or a chunk of it, with these choices; ``version``: of the weights that made
        them, as the engine counts them."""

    @abc.abstractmethod
    def choice(self, index: int, completion: Completion) -> C:
        """A whole choice."""

    @abc.abstractmethod
    def writer(self, index: int) -> "ChoiceWriter[C]":
        """The writer of a choice in chunks."""


class ChoiceWriter[C: Choice](abc.ABC):
    """Writes the chunks of one choice of a stream."""

    def __init__(self, prepared: PreparedRequest[Any, C, Any], index: int):
        self.prepared, self.index = prepared, index

    @functools.cached_property
    def _rounds(self) -> RoundTexts:
        return self.prepared.rounds_of(self.index)

    @abc.abstractmethod
    def chunks(self, event: TextChunk) -> list[C]:
        """What is new, as chunks of the choice."""

    @abc.abstractmethod
    def ending(self, reason: str) -> C:
        """The last chunk, which says why the text ended: ``stop`` or ``length``."""

    @abc.abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprob]) -> Any:
        """Log-probabilities of new tokens, in the shape of the choice."""

    def last(self, completion: Completion) -> C:
        choice = self.ending(results.finish_reason(completion))
        choice.stop_reason = self.prepared.stop_reason(completion)
        if self.prepared.request.return_speculation:
            choice.speculation = results.speculation(completion)
        return choice

    def has_asked(self, event: TextChunk) -> bool:
        """Whether there is anything that the request asks for beside the text."""
        new = [event.logprobs, event.policy_logprobs, event.trees]
        if self.prepared.request.return_token_ids:
            new.append(event.token_ids)
        return any(new)

    def add_tokens(self, choice: C, event: TextChunk) -> None:
        """Add to a chunk what the request asks for beside the text."""
        if event.logprobs is not None:
            entries = self.prepared.text_logprobs(event.logprobs, event.token_ids)
            choice.logprobs = self.logprobs(entries)
        choice.policy_logprobs = event.policy_logprobs
        if self.prepared.request.return_token_ids:
            choice.token_ids = event.token_ids
        if event.trees is not None:
            choice.speculation = Speculation(trees=self._rounds.add(event.trees))


# Checks and encodes a request when it is called.
type Preparing[A: GeneratedResponse] = Callable[[], Awaitable[PreparedRequest[Any, Any, A]]]


type Ended = Callable[[PreparedRequest[Any, Any, Any], Sequence[Completion]], None]


class Told(NamedTuple):
    """Who is told of a request.

    Attributes:
      spend: of its tokens, as they come.
      ended: when all of its texts have ended.
    """

    spend: Callable[[int], None] = lambda tokens: None
    ended: Ended = lambda prepared, completions: None


async def answer[A: GeneratedResponse](prepare: Preparing[A], told: Told) -> A:
    """The whole answer.

    Raises ApiError, and what AsyncLLM.generate raises.
    """
    prepared = await prepare()
    service = prepared.service
    told.spend(sum(map(len, prepared.prompts)))
    written = await service.llm.generate(
        prepared.prompts,
        prepared.sampling,
        timeout=service.request_timeout,
        options=prepared.options,
        on_tokens=told.spend,
    )
    told.ended(prepared, written)
    completions = [prepared.kept(completion) for completion in written]
    choices = [prepared.choice(index, found) for index, found in enumerate(completions)]
    response = prepared.response(choices, min(completion.version for completion in written))
    response.usage = prepared.usage(completions)
    return response


async def stream[A: GeneratedResponse](
    prepare: Preparing[A], told: Told
) -> AsyncGenerator[A, None]:
    """The answer in chunks, those of several choices as they come."""
    prepared = await prepare()
    service, options = prepared.service, prepared.request.stream_options
    prompt_tokens, generated = sum(map(len, prepared.prompts)), 0
    told.spend(prompt_tokens)
    writers = [prepared.writer(index) for index in range(len(prepared.prompts) * prepared.samples)]
    completions: list[Completion] = []
    events = service.llm.stream(
        prepared.prompts,
        prepared.sampling,
        timeout=service.request_timeout,
        options=prepared.options,
    )
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Completion):
                writer = writers[len(completions)]
                completions.append(event)
                if len(completions) == len(writers):
                    told.ended(prepared, completions)
                choices = [writer.last(event)]
            else:
                generated += len(event.token_ids)
                told.spend(len(event.token_ids))
                choices = writers[event.index].chunks(event)
            for choice in choices:
                response = prepared.response([choice], event.version, chunk=True)
                if options is not None and options.continuous_usage_stats:
                    response.usage = results.partial_usage(prompt_tokens, generated, 0)
                yield response
    if options is not None and options.include_usage:
        response = prepared.response([], completions[-1].version, chunk=True)
        response.usage = prepared.usage(completions)
        yield response
