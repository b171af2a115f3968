"""The fields that chat and text completions share."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from jaxspec.config.sampling_params import ParameterError, check_parameter
from jaxspec.serving.protocol.base import FieldError, RequestBody, ResponseBody
from jaxspec.serving.protocol.unions import LIST, OBJECT, TEXT, by_shape

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]  # no "1", and no true
type TokenIds = Annotated[list[TokenId], FailFast()]
type Texts = Annotated[list[str], FailFast()]


# Most of each: more of them would take the server's time before they are refused, or kept.
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1000
MOST_STOP_TOKENS = 1024
MOST_BIASES = 16_384
MOST_ALLOWED = 2**18
MOST_SALT_CHARACTERS = 1000
type Stop = Annotated[str, Field(max_length=MOST_STOP_CHARACTERS)]
type Stops = Annotated[list[Stop], FailFast(), Field(max_length=MOST_STOPS)]
type StopOrStops = Annotated[
    Annotated[Stop, Tag(TEXT)] | Annotated[Stops, Tag(LIST)],
    by_shape("Input should be text, or a list of texts"),
]
type ObjectOrText = Annotated[
    Annotated[dict[str, Any], Tag(OBJECT)] | Annotated[str, Tag(TEXT)],
    by_shape("Input should be an object, or the text of one"),
]


def _bias(value: Any) -> Any:
    """OpenAI's object of token ids as strings, with integer keys.

    Raises ValueError for too many.
    """
    if not isinstance(value, dict):
        return value
    if len(value) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} tokens may have a bias")
    return {int(key) if str(key).isdecimal() else key: bias for key, bias in value.items()}


# Fields that are checked as they are: they mean the same in SamplingParams.
RANGED = (
    *("temperature", "top_p", "min_p", "min_tokens", "logit_bias", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt"),
)


def in_range(value: Any, info: ValidationInfo) -> Any:
    """The value of such a field: so it is told with what else is wrong with a body.

    Raises FieldError.
    """
    name = str(info.field_name)
    try:
        if value is not None:
            check_parameter(name, value)
    except ParameterError as error:
        raise FieldError(name, str(error)) from error
    return value


def stated(**rule: Any) -> Any:
    """A field that may be left out, whose rule ``in_range`` enforces: the OpenAPI document has it,
    too. Keywords of a JSON schema hold for values of their types alone, so null is allowed."""
    return Field(None, json_schema_extra=rule)


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against listeners: there is none
    continuous_usage_stats: bool = False


class StructuredOutputs(RequestBody):
    """vLLM's: exactly one of these describes the whole text."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), populate_by_name=True)

    json_schema: ObjectOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


class SamplingControls(RequestBody):
    """How to sample. None: the default of the engine, or of OpenAI."""

    temperature: float | None = stated(minimum=0)
    top_p: float | None = stated(exclusiveMinimum=0, maximum=1)
    top_k: int | None = None
    min_p: float | None = stated(minimum=0, maximum=1)
    seed: int | None = None
    min_tokens: int | None = stated(minimum=0)
    stop: StopOrStops | None = None
    stop_token_ids: TokenIds | None = Field(None, max_length=MOST_STOP_TOKENS)
    ignore_eos: bool = False
    presence_penalty: float | None = stated(minimum=-2, maximum=2)
    frequency_penalty: float | None = stated(minimum=-2, maximum=2)
    repetition_penalty: float | None = stated(minimum=0.01, maximum=100)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias)] | None = stated(
        propertyNames={"pattern": "^[0-9]+$"}
    )
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, max_length=MOST_ALLOWED)
    bad_words: Stops | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MOST_SALT_CHARACTERS)
    plain: bool = False  # draft nothing, see SamplingParams

    _in_range = field_validator(*RANGED)(in_range)


class SamplingFields(SamplingControls):
    """How to sample, and what to return."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    policy_logprobs: bool = False  # of tokens as they were sampled, see SamplingParams
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    truncation_side: Literal["left", "right"] | None = None  # which is cut off; left by default
    structured_outputs: StructuredOutputs | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_speculation: bool = False


class PromptTokensDetails(ResponseBody):
    cached_tokens: int


class CompletionTokensDetails(ResponseBody):
    reasoning_tokens: int


class Usage(ResponseBody):
    optional: ClassVar = frozenset({"completion_tokens_details"})

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Speculation(ResponseBody):
    """How a text came about.

    Attributes:
      rounds: of draft and verification.
      drafted: tokens that were drafted.
      acceptance_length: tokens committed in a round, on average, the bonus token included.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, ... drafted tokens.
      trees: of each round, see tree_text.RoundTexts; a chunk of a stream has them alone.
    """

    optional: ClassVar = frozenset(
        {"rounds", "drafted", "acceptance_length", "acceptance_by_depth", "trees"}
    )

    rounds: int | None = None
    drafted: int | None = None
    acceptance_length: float | None = None
    acceptance_by_depth: list[float] | None = None
    trees: list[dict[str, Any]] | None = None


class PromptLogprob(ResponseBody):
    """``rank`` is None for a token that is not among the likeliest that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


type PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(ResponseBody):
    """What a choice has beside its text.

    ``stop_reason`` is the stop string or the token of ``stop_token_ids`` that has ended it, as vLLM
    has it; None: a stop token of the model, or the limit. ``policy_logprobs`` has an entry for each
    of ``token_ids``.
    """

    optional: ClassVar = frozenset(
        {"token_ids", "prompt_token_ids", "prompt_logprobs", "policy_logprobs", "speculation"}
    )

    index: int
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    policy_logprobs: list[float] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    speculation: Speculation | None = None


class GeneratedResponse(ResponseBody):
    """Also a chunk of a stream; ``usage`` is in its last one, if it is asked for.

    ``weight_version`` is there where an admin may change the weights.
    """

    optional: ClassVar = frozenset({"weight_version"})

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    weight_version: str | None = None
    usage: Usage | None = None
