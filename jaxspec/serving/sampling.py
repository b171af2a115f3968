"""From the fields of a request to SamplingParams."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.sampling_params import ParameterError, SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.llm.completion import TextOptions
from jaxspec.serving.errors import ApiError
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.sampling import SamplingFields
from jaxspec.serving.service import Service

SEEDS = 2**32
LEAST_TEMPERATURE = 1e-5  # below it is 0, as in vLLM: logits would not be finite
MOST_CHARACTERS = 128  # of a token; longer texts need not be tokenized to see that they do not fit

# Fields that mean the same, under the same name.
_SAME = (
    *("temperature", "top_p", "min_p", "n", "min_tokens", "ignore_eos", "priority"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "cache_salt"),
    *("allowed_token_ids", "prompt_logprobs", "policy_logprobs", "plain"),
)

# Parameters that have no field of their name: what a client calls them.
_IN_REQUESTS = {
    "structured": "a structured output or a forced tool call",
    "reasoning_budget": "thinking_token_budget",
    "bad_token_ids": "bad_words",
    "bad_sequences": "bad_words",
}


def sampling_params(
    request: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    structured: StructuredOutput | None,
    model_stops: tuple[int, ...],
    **other: Any,
) -> SamplingParams:
    """How a request samples.

    Args:
      defaults: of fields that the request does not have, see generation_config; what these lack is
        as OpenAI has it: the temperature is 1.
      model_stops: tokens that end the model's texts; those of the request come in addition.
      other: fields of SamplingParams.

    Raises FieldError, which names the field, for values out of range.
    """
    values: dict[str, Any] = {"temperature": 1.0, **defaults, "max_tokens": max_tokens}
    for name in _SAME:
        if getattr(request, name) is not None:
            values[name] = getattr(request, name)
    if 0 < values["temperature"] < LEAST_TEMPERATURE:
        values["temperature"] = 0.0
    if request.seed is not None:
        values["seed"] = request.seed % SEEDS
    if request.top_k is not None:
        values["top_k"] = max(0, request.top_k)  # vLLM says -1 for all
    if request.stop:
        values["stop"] = request.stop
    if request.stop_token_ids:
        further = () if request.ignore_eos else model_stops
        values["stop_token_ids"] = tuple(dict.fromkeys((*request.stop_token_ids, *further)))
    values |= {"logprobs": logprobs, "structured": structured, **other}
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        problem = in_words_of_requests(error)
        if error.name not in type(request).model_fields:
            raise ApiError(400, problem) from error
        raise FieldError(error.name, problem) from error


def in_words_of_requests(error: ValueError) -> str:
    """What an error says, with the names that fields of requests have."""
    names = re.compile(rf"\b({'|'.join(_IN_REQUESTS)})\b")
    return names.sub(lambda found: _IN_REQUESTS[found[1]], str(error))


def text_options(request: SamplingFields) -> TextOptions:
    return TextOptions(request.skip_special_tokens, request.include_stop_str_in_output)


def truncated(prompt: list[int], request: SamplingFields) -> list[int]:
    """The tokens of a prompt that are read."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    return prompt[:keep] if request.truncation_side == "right" else prompt[-keep:]


def tokens_left(
    prompt: list[int], wanted: int | None, service: Service, default: int | None
) -> int:
    """Most new tokens of a request: what it asks for, ``default``, or (None) all that fit.

    Raises ApiError if the prompt, or it and what is asked for, are too long.
    """
    max_length = service.max_length
    fitting = max_length - len(prompt)
    if fitting < 1 or (wanted or 0) > fitting:
        asked = "" if wanted is None else f" and {wanted} new ones"
        raise ApiError(
            400,
            f"the prompt's {len(prompt)} tokens{asked} do not fit {max_length}: shorten the prompt"
            + ("" if wanted is None else ", or ask for fewer tokens"),
            param="prompt" if fitting < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    most = fitting if service.max_new_tokens is None else min(fitting, service.max_new_tokens)
    if wanted is not None and wanted > most:
        raise FieldError("max_tokens", f"at most {most} tokens may be asked for, got {wanted}")
    if wanted is not None:
        return wanted
    return most if default is None else min(default, most)


def check_length(param: str, prompt: str | Sequence[int], max_length: int) -> None:
    """Raise FieldError for a prompt that is far too long, before any work is done for it."""
    most = max_length * MOST_CHARACTERS if isinstance(prompt, str) else max_length
    if len(prompt) > most:
        raise FieldError(param, f"{param}: too long, at most {max_length} tokens fit")


def check_stream(request: SamplingFields) -> None:
    """Raise FieldError for fields that do not go with the request's ``stream``."""
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "stream_options is for streams: set stream to true")
    if request.stream and request.prompt_logprobs is not None:
        raise FieldError("prompt_logprobs", "prompt_logprobs cannot be streamed")
