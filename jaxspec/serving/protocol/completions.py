"""`/v1/completions`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, Tag

from jaxspec.serving.protocol.base import REFUSED, FieldError, Refused, ResponseBody
from jaxspec.serving.protocol.sampling import (
    Choice,
    GeneratedResponse,
    SamplingFields,
    Texts,
    TokenIds,
)
from jaxspec.serving.protocol.unions import LIST, LISTS, TEXT, TOKENS, by_shape, prompt_shape

type TokenIdLists = Annotated[list[TokenIds], FailFast()]
DEFAULT_MAX_TOKENS = 16
MOST_PROMPTS = 128


def _few(prompts: Any) -> Any:
    """Seen before each is looked at. Raises FieldError for too many."""
    if (
        isinstance(prompts, list)
        and len(prompts) > MOST_PROMPTS
        and not isinstance(prompts[0], int)
    ):
        raise FieldError("prompt", f"{len(prompts)} prompts are more than {MOST_PROMPTS}")
    return prompts


class CompletionRequest(SamplingFields):
    refused: ClassVar[Refused] = MappingProxyType(
        {
            **REFUSED,
            "prompt_embeds": ((), "give the prompt as text or token ids"),
            "suffix": (("",), "put it into the prompt, in the form that the model was trained on"),
        }
    )

    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[TokenIds, Tag(TOKENS)]
        | Annotated[Texts, Tag(LIST)]
        | Annotated[TokenIdLists, Tag(LISTS)],
        by_shape("Input should be text, token ids, or a list of either", prompt_shape),
        BeforeValidator(_few),
    ]
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = False
    # Routers send false for "none".
    logprobs: Annotated[int | None, BeforeValidator(lambda v: None if v is False else v)] = None


class CompletionLogprobs(ResponseBody):
    """One entry a token; of an echoed prompt's first token there are no log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[Mapping[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class CompletionResponse(GeneratedResponse):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
