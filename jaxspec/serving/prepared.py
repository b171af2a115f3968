"""Requests that are ready for the engine, and their answers: whole, or in chunks."""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion, TextChunk, TextOptions
from jaxspec.llm.tree_text import RoundTexts
from jaxspec.serving import results
from jaxspec.serving.protocol.chat import ChatChoice, ChatRequest, ChatResponse
from jaxspec.serving.protocol.completions import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from jaxspec.serving.protocol.sampling import Speculation
from jaxspec.serving.service import Service


@dataclasses.dataclass(frozen=True)
class PreparedRequest[
    Request: (ChatRequest, CompletionRequest),
    Choice: (ChatChoice, CompletionChoice),
    Response: (ChatResponse, CompletionResponse),
](abc.ABC):
    """A request, ready for the engine: token ids and sampling of each prompt."""

    request: Request
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

    def text_logprobs(
        self, entries: Sequence[TokenLogprob], token_ids: Sequence[int]
    ) -> Sequence[TokenLogprob]:
        return results.without_stop(self.service.llm.llm, self.sampling[0], entries, token_ids)

    @abc.abstractmethod
    def response(self, choices: list[Choice], *, chunk: bool = False) -> Response:
        """The answer, or a chunk of it, with these choices."""

    @abc.abstractmethod
    def choice(self, index: int, completion: Completion) -> Choice:
        """A whole choice."""

    @abc.abstractmethod
    def writer(self, index: int) -> "ChoiceWriter[Choice]":
        """The writer of a choice in chunks."""


class ChoiceWriter[Choice: (ChatChoice, CompletionChoice)](abc.ABC):
    """Writes the chunks of one choice of a stream."""

    def __init__(self, prepared: PreparedRequest[Any, Choice, Any], index: int):
        self.prepared, self.index = prepared, index

    @functools.cached_property
    def _rounds(self) -> RoundTexts:
        prompt = self.prepared.prompt_of(self.index)
        return RoundTexts(self.prepared.service.llm.llm.detokenize, prompt)

    @abc.abstractmethod
    def chunks(self, event: TextChunk) -> list[Choice]:
        """What is new, as chunks of the choice."""

    @abc.abstractmethod
    def ending(self, reason: str) -> Choice:
        """The last chunk, which says why the text ended: ``stop`` or ``length``."""

    @abc.abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprob]) -> Any:
        """Log-probabilities of new tokens, in the shape of the choice."""

    def last(self, completion: Completion) -> Choice:
        choice = self.ending(results.finish_reason(completion))
        if self.prepared.request.return_speculation:
            choice.speculation = results.speculation(completion)
        return choice

    def add_tokens(self, choice: Choice, event: TextChunk) -> None:
        """Add to a chunk what the request asks for beside the text."""
        if event.logprobs is not None:
            entries = self.prepared.text_logprobs(event.logprobs, event.token_ids)
            choice.logprobs = self.logprobs(entries)
        if self.prepared.request.return_token_ids:
            choice.token_ids = event.token_ids
        if event.trees is not None:
            choice.speculation = Speculation(trees=self._rounds.add(event.trees))


# Checks and encodes a request when it is called.
type Preparing[Response: (ChatResponse, CompletionResponse)] = Callable[
    [], Awaitable[PreparedRequest[Any, Any, Response]]
]


async def answer[Response: (ChatResponse, CompletionResponse)](
    prepare: Preparing[Response], spend: Callable[[int], None]
) -> Response:
    """The whole answer. ``spend`` is told of the tokens, as they come.

    Raises ApiError, and what AsyncLLM.generate raises.
    """
    prepared = await prepare()
    service = prepared.service
    spend(sum(map(len, prepared.prompts)))
    completions = await service.llm.generate(
        prepared.prompts,
        prepared.sampling,
        timeout=service.request_timeout,
        options=prepared.options,
        on_tokens=spend,
    )
    choices = [prepared.choice(index, found) for index, found in enumerate(completions)]
    response = prepared.response(choices)
    response.usage = results.usage(completions, prepared.samples)
    return response


async def stream[Response: (ChatResponse, CompletionResponse)](
    prepare: Preparing[Response], spend: Callable[[int], None]
) -> AsyncGenerator[Response, None]:
    """The answer in chunks, those of several choices as they come."""
    prepared = await prepare()
    service, options = prepared.service, prepared.request.stream_options
    prompt_tokens, generated = sum(map(len, prepared.prompts)), 0
    spend(prompt_tokens)
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
                choices = [writers[len(completions)].last(event)]
                completions.append(event)
            else:
                generated += len(event.token_ids)
                spend(len(event.token_ids))
                choices = writers[event.index].chunks(event)
            for choice in choices:
                response = prepared.response([choice], chunk=True)
                if options is not None and options.continuous_usage_stats:
                    response.usage = results.partial_usage(prompt_tokens, generated, 0)
                yield response
    if options is not None and options.include_usage:
        response = prepared.response([], chunk=True)
        response.usage = results.usage(completions, prepared.samples)
        yield response
