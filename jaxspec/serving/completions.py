"""`/v1/completions`: prompts as text or token ids, one or many, each continued n times."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion, TextChunk
from jaxspec.llm.tokenizer.detokenizer import Detokenizer
from jaxspec.llm.tree_text import RoundTexts
from jaxspec.serving import results
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from jaxspec.serving.protocol.sampling import Speculation
from jaxspec.serving.sampling import (
    check_length,
    check_stream,
    sampling_params,
    text_options,
    tokens_left,
)
from jaxspec.serving.service import Service
from jaxspec.serving.structured import structured_output


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A request, ready for the engine: token ids and sampling of each prompt."""

    request: CompletionRequest
    service: Service
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    id: str
    created: int

    @property
    def samples(self) -> int:
        return self.request.n or 1

    def response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        name = self.service.name
        return CompletionResponse(id=self.id, created=self.created, model=name, choices=choices)

    def text_logprobs(
        self, entries: Sequence[TokenLogprob], token_ids: Sequence[int]
    ) -> Sequence[TokenLogprob]:
        return results.without_stop(self.service.llm.llm, self.sampling[0], entries, token_ids)

    def places(self, index: int) -> results.TokenPlaces:
        """Where the tokens begin that a choice adds to its prompt."""
        skip = text_options(self.request).skip_special
        decode = functools.partial(self.service.llm.llm.detokenize, skip_special=skip)
        before = self.prompts[index // self.samples]
        return results.TokenPlaces(Detokenizer(decode, before), len(self.echoed(index)))

    def prompt_places(self) -> results.TokenPlaces:
        """Where the tokens of an echoed prompt begin; a prompt of token ids shows special ones."""
        skip = isinstance(self.request.prompt, str)
        decode = functools.partial(self.service.llm.llm.detokenize, skip_special=skip)
        return results.TokenPlaces(Detokenizer(decode), 0)

    def echoed(self, index: int) -> str:
        """The prompt's text, if a choice begins with it."""
        if not self.request.echo:
            return ""
        prompt = self.request.prompt
        if isinstance(prompt, str) and self.request.truncate_prompt_tokens is None:
            return prompt
        return self.service.llm.llm.detokenize(self.prompts[index // self.samples])


async def complete(
    service: Service, request: CompletionRequest, spend: Callable[[int], None]
) -> CompletionResponse:
    """The whole answer. ``spend`` is told of the tokens, as they come.

    Raises ApiError, and what AsyncLLM.generate raises.
    """
    plan = await _plan(service, request)
    spend(sum(map(len, plan.prompts)))
    completions = await service.llm.generate(
        plan.prompts,
        plan.sampling,
        timeout=service.request_timeout,
        options=text_options(request),
        on_tokens=spend,
    )
    choices = [_choice(plan, index, one) for index, one in enumerate(completions)]
    response = plan.response(choices)
    response.usage = results.usage(completions, plan.samples)
    return response


async def stream(
    service: Service, request: CompletionRequest, spend: Callable[[int], None]
) -> AsyncGenerator[CompletionResponse, None]:
    """The answer in chunks, those of several choices as they come."""
    plan = await _plan(service, request)
    options = request.stream_options
    writers = [_Writer(plan, index) for index in range(len(plan.prompts) * plan.samples)]
    generated, completions = 0, []
    prompt_tokens = sum(map(len, plan.prompts))
    spend(prompt_tokens)
    chunks = service.llm.stream(
        plan.prompts, plan.sampling, timeout=service.request_timeout, options=text_options(request)
    )
    async with contextlib.aclosing(chunks):
        async for event in chunks:
            if isinstance(event, Completion):
                completions.append(event)
                response = plan.response([_last_chunk(plan, len(completions) - 1, event)])
            else:
                generated += len(event.token_ids)
                spend(len(event.token_ids))
                response = plan.response([writers[event.index].chunk(event)])
            if options is not None and options.continuous_usage_stats:
                response.usage = results.partial_usage(prompt_tokens, generated, 0)
            yield response
    if options is not None and options.include_usage:
        response = plan.response([])
        response.usage = results.usage(completions, plan.samples)
        yield response


async def _plan(service: Service, request: CompletionRequest) -> _Plan:
    service.check_ready()
    service.check_model(request.model)
    _check_together(request)
    tokens = await service.llm.tokenize(_prompts(request, service.max_length))
    if request.truncate_prompt_tokens is not None:
        tokens = [ids[-request.truncate_prompt_tokens :] for ids in tokens]
    structured = structured_output(request)
    stops = service.llm.llm.params.target.config.stop_token_ids
    other: dict[str, Any] = {"trees": service.shows_trees and request.return_speculation}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        other["prompt_logprobs"] = request.logprobs
    if request.best_of is not None:
        other["best_of"] = request.best_of
    sampling = [
        sampling_params(
            request,
            max_tokens=tokens_left(ids, request.max_tokens, service, DEFAULT_MAX_TOKENS),
            logprobs=request.logprobs,
            structured=structured,
            model_stops=stops,
            **other,
        )
        for ids in tokens
    ]
    return _Plan(request, service, tokens, sampling, results.new_id("cmpl"), results.now())


def _check_together(request: CompletionRequest) -> None:
    """Raise FieldError for fields that do not go together."""
    check_stream(request)
    if request.stream and request.echo and request.logprobs is not None:
        raise FieldError("echo", "echo with logprobs cannot be streamed")
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise FieldError("best_of", "best_of cannot be streamed: use n")


def _prompts(request: CompletionRequest, max_length: int) -> Sequence[str | list[int]]:
    given: Any = request.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[str | list[int]] = [given] if is_one else list(given)
    if not prompts or not all(prompts):
        raise FieldError("prompt", "a prompt is empty: give at least one token")
    for prompt in prompts:
        check_length("prompt", prompt, max_length)
    return prompts


def _choice(plan: _Plan, index: int, completion: Completion) -> CompletionChoice:
    texts, request = plan.service.texts, plan.request
    choice = CompletionChoice(
        index=index,
        text=plan.echoed(index) + completion.text,
        finish_reason=results.finish_reason(completion),
    )
    if request.logprobs is not None:
        choice.logprobs = _all_logprobs(plan, index, completion)
    results.add_asked(choice, request, completion, plan.service.llm.llm, texts)
    return choice


def _all_logprobs(plan: _Plan, index: int, completion: Completion) -> CompletionLogprobs:
    texts = plan.service.texts
    own = plan.text_logprobs(completion.logprobs or [], completion.token_ids)
    found = texts.logprobs(own, plan.places(index))
    if not plan.request.echo:
        return found
    first, places = completion.prompt_token_ids[0], plan.prompt_places()
    begin = places.next(first)
    prompt = texts.logprobs(completion.prompt_logprobs or [], places)
    return CompletionLogprobs(
        tokens=[texts.of(first), *prompt.tokens, *found.tokens],
        token_logprobs=[None, *prompt.token_logprobs, *found.token_logprobs],
        top_logprobs=[None, *prompt.top_logprobs, *found.top_logprobs],
        text_offset=[begin, *prompt.text_offset, *found.text_offset],
    )


class _Writer:
    """Chunks of one choice of a stream."""

    def __init__(self, plan: _Plan, index: int):
        self._plan, self._index, self._begun = plan, index, False

    @functools.cached_property
    def _places(self) -> results.TokenPlaces:
        return self._plan.places(self._index)

    @functools.cached_property
    def _rounds(self) -> RoundTexts:
        prompt = self._plan.prompts[self._index // self._plan.samples]
        return RoundTexts(self._plan.service.llm.llm.detokenize, prompt)

    def chunk(self, event: TextChunk) -> CompletionChoice:
        echoed = "" if self._begun else self._plan.echoed(self._index)
        self._begun = True
        choice = CompletionChoice(index=self._index, text=echoed + event.text)
        if event.logprobs is not None:
            own = self._plan.text_logprobs(event.logprobs, event.token_ids)
            choice.logprobs = self._plan.service.texts.logprobs(own, self._places)
        if self._plan.request.return_token_ids:
            choice.token_ids = event.token_ids
        if event.trees is not None:
            choice.speculation = Speculation(trees=self._rounds.add(event.trees))
        return choice


def _last_chunk(plan: _Plan, index: int, completion: Completion) -> CompletionChoice:
    reason = results.finish_reason(completion)
    choice = CompletionChoice(index=index, text="", finish_reason=reason)
    if plan.request.return_speculation:
        choice.speculation = results.speculation(completion)
    return choice
