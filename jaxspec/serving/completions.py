"""`/v1/completions`: prompts as text or token ids, one or many, each continued n times."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion, TextChunk
from jaxspec.llm.tokenizer.detokenizer import Detokenizer
from jaxspec.serving import results
from jaxspec.serving.bad_words import without_bad_words
from jaxspec.serving.prepared import ChoiceWriter, PreparedRequest
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from jaxspec.serving.sampling import (
    check_length,
    check_stream,
    sampling_params,
    text_options,
    tokens_left,
    truncated,
)
from jaxspec.serving.service import Service
from jaxspec.serving.structured import structured_output


@dataclasses.dataclass(frozen=True)
class PreparedCompletion(PreparedRequest[CompletionRequest, CompletionChoice, CompletionResponse]):
    """Prompts to continue, ready for the engine."""

    operation = "text_completion"

    def response(
        self, choices: list[CompletionChoice], version: int, *, chunk: bool = False
    ) -> CompletionResponse:
        weights = self.service.weights_of(version)
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            system_fingerprint=weights.fingerprint,
            weight_version=weights.weight_version,
            choices=choices,
        )

    def choice(self, index: int, completion: Completion) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=self.echoed(index) + completion.text,
            finish_reason=results.finish_reason(completion),
        )
        if self.request.logprobs is not None:
            choice.logprobs = self._all_logprobs(index, completion)
        self.add_asked(choice, completion)
        return choice

    def kept(self, completion: Completion) -> Completion:
        """Without the token that the engine wrote for a request of none."""
        if self.request.max_tokens != 0 or completion.finish_reason not in ("stop", "length"):
            return completion
        return dataclasses.replace(
            completion,
            text="",
            token_ids=[],
            logprobs=None if completion.logprobs is None else [],
            policy_logprobs=None if completion.policy_logprobs is None else [],
            finish_reason="length",
            stop_string=None,
        )

    def text_logprobs(
        self, entries: Sequence[TokenLogprob], token_ids: Sequence[int]
    ) -> Sequence[TokenLogprob]:
        """A stop token's, too, as OpenAI and vLLM have it: programs that score texts cut off the
        last entry, that of the token after the text."""
        return entries

    def writer(self, index: int) -> "CompletionWriter":
        return CompletionWriter(self, index)

    def _all_logprobs(self, index: int, completion: Completion) -> CompletionLogprobs:
        texts = self.service.texts
        entries = self.text_logprobs(completion.logprobs or [], completion.token_ids)
        found = texts.logprobs(entries, self.places(index))
        if not self.request.echo:
            return found
        first, places = completion.prompt_token_ids[0], self._prompt_places()
        begin = places.next(first)
        prompt = texts.logprobs(completion.prompt_logprobs or [], places)
        return CompletionLogprobs(
            tokens=[texts.of(first), *prompt.tokens, *found.tokens],
            token_logprobs=[None, *prompt.token_logprobs, *found.token_logprobs],
            top_logprobs=[None, *prompt.top_logprobs, *found.top_logprobs],
            text_offset=[begin, *prompt.text_offset, *found.text_offset],
        )

    def places(self, index: int) -> results.TokenPlaces:
        """Where the tokens begin that a choice adds to its prompt."""
        skip = self.options.skip_special
        decode = functools.partial(self.service.llm.llm.detokenize, skip_special=skip)
        before = Detokenizer(decode, self.prompt_of(index))
        return results.TokenPlaces(before, len(self.echoed(index)))

    def _prompt_places(self) -> results.TokenPlaces:
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
        return self.service.llm.llm.detokenize(self.prompt_of(index))


class CompletionWriter(ChoiceWriter[CompletionChoice]):
    """Writes the chunks of one choice of a prompt."""

    def __init__(self, prepared: PreparedCompletion, index: int):
        super().__init__(prepared, index)
        self._echoed = prepared.echoed(index)  # until the first chunk
        self._prepared = prepared

    @functools.cached_property
    def _places(self) -> results.TokenPlaces:
        return self._prepared.places(self.index)

    def chunks(self, event: TextChunk) -> list[CompletionChoice]:
        choice = CompletionChoice(index=self.index, text=self._echoed + event.text)
        self._echoed = ""
        self.add_tokens(choice, event)
        return [choice]

    def ending(self, reason: str) -> CompletionChoice:
        return CompletionChoice(index=self.index, text="", finish_reason=reason)

    def logprobs(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return self.prepared.service.texts.logprobs(entries, self._places)


async def prepare(service: Service, request: CompletionRequest) -> PreparedCompletion:
    """The request as the engine takes it. Raises ApiError for one that cannot be served."""
    service.check(request.model)
    _check_together(request)
    tokens = await service.llm.tokenize(_prompts(request, service.max_length))
    tokens = [truncated(ids, request) for ids in tokens]
    structured = structured_output(request, whitespace=service.json_whitespace)
    stops = service.llm.llm.params.target.config.stop_token_ids
    other: dict[str, Any] = {"trees": service.shows_trees and request.return_speculation}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        other["prompt_logprobs"] = request.logprobs
    if request.best_of is not None:
        other["best_of"] = request.best_of
    wanted = 1 if request.max_tokens == 0 else request.max_tokens  # the engine writes one at least
    sampling = [
        sampling_params(
            request,
            service.sampling_defaults,
            max_tokens=tokens_left(ids, wanted, service, DEFAULT_MAX_TOKENS),
            logprobs=request.logprobs,
            structured=structured,
            model_stops=stops,
            **other,
        )
        for ids in tokens
    ]
    sampling = [without_bad_words(params, request, service) for params in sampling]
    options = text_options(request)
    name = results.new_id("cmpl")
    return PreparedCompletion(request, service, tokens, sampling, options, name)


def _check_together(request: CompletionRequest) -> None:
    """Raise FieldError for fields that do not go together."""
    check_stream(request)
    if request.stream and request.echo and request.logprobs is not None:
        raise FieldError("echo", "echo with logprobs cannot be streamed")
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise FieldError("best_of", "best_of cannot be streamed: use n")
    if request.max_tokens == 0 and (request.stream or not request.echo):
        raise FieldError("max_tokens", "max_tokens 0 needs echo, and cannot be streamed")


def _prompts(request: CompletionRequest, max_length: int) -> Sequence[str | list[int]]:
    given: Any = request.prompt
    is_single = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[str | list[int]] = [given] if is_single else list(given)
    if not prompts or not all(prompts):
        raise FieldError("prompt", "a prompt is empty: give at least one token")
    for prompt in prompts:
        check_length("prompt", prompt, max_length)
    return prompts
