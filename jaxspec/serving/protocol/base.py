"""What all requests and responses share: which fields are known, tolerated and refused."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer
from pydantic import model_validator as validator

# Fields that routers add to every request, and the values that ask for nothing.
ROUTER_FIELDS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "continue_final_message": (False,),
        "ignore_eos": (False,),
        "no_stop_trim": (False,),
        "return_hidden_states": (False,),
        "skip_special_tokens": (True,),
    }
)
# Fields that change no text, whatever their values: they name the caller or the request, are hints
# to OpenAI's caches, stores, queues and models, or say in how many chunks reasoning is streamed. In
# completions there is no reasoning to leave out.
HINTS = frozenset(
    {
        *("request_id", "service_tier", "session_id", "store", "verbosity"),
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"),
        *("include_reasoning", "separate_reasoning", "stream_reasoning"),
    }
)

MOST_FIELDS = 200  # each unknown one would be an error of its own

IDLE = object()  # the value of a field that asks for nothing

# Fields that cannot be honoured: the values that ask for nothing (besides null), and what to do.
type Refused = Mapping[str, tuple[tuple[Any, ...], str]]

# vLLM's, of every API.
REFUSED_EVERYWHERE: Refused = MappingProxyType(
    {
        "ec_transfer_params": ((), "leave it out"),
        "kv_transfer_params": ((), "leave it out"),
        "media_io_kwargs": ((), "only text is read"),
        "mm_payload": (("tensors",), "only text is read"),
        "mm_processor_kwargs": ((), "only text is read"),
        "return_mm_kwargs": ((False,), "only text is read"),
        "vllm_xargs": ((), "leave it out"),
        "watermarking": ((False,), "texts have no watermark"),
    }
)
REFUSED: Refused = MappingProxyType(
    {
        **REFUSED_EVERYWHERE,
        "add_special_tokens": ((True,), "give the prompt as token ids"),
        "detokenize": ((True,), "ask for return_token_ids"),
        "early_stopping": ((False,), "there is no beam search: sample n texts"),
        "guided_choice": ((), "use structured_outputs.choice"),
        "guided_grammar": ((), "use structured_outputs.grammar"),
        "guided_json": ((), "use structured_outputs.json"),
        "guided_regex": ((), "use structured_outputs.regex"),
        "length_penalty": ((1.0,), "there is no beam search: sample n texts"),
        "logprob_token_ids": (([],), "ask for the likeliest, with logprobs"),
        "lora_path": ((), "merge the adapter into the model"),
        "repetition_detection": ((), "use repetition_penalty, or stop"),
        "return_token_offsets": ((False,), "use /tokenize, with return_token_strs"),
        "return_tokens_as_token_ids": ((False,), "ask for return_token_ids"),
        "return_weight_versions": ((False,), "answers have a weight_version, if there are several"),
        "routed_experts_prompt_start": ((0,), "which experts are chosen is not told"),
        "spaces_between_special_tokens": ((True,), "leave it out"),
        "stream_interval": ((1,), "a chunk has the tokens of a call: see --rounds-per-call"),
        "thinking_token_budget": ((-1,), "use /v1/chat/completions"),
        "use_beam_search": ((False,), "sample n texts"),
    }
)


class FieldError(ValueError):
    """A field of a request that cannot be; ``param`` names it."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


class RequestBody(BaseModel):
    """A request. An unknown field is an error that names it, unless it asks for nothing. Values
    have the types of JSON: 1 is no boolean, and "1" no number, but 1.0 is an integer.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
    refused: ClassVar[Refused] = REFUSED
    hints: ClassVar[frozenset[str]] = HINTS

    @validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_FIELDS:
            raise FieldError("body", f"{len(body)} fields are more than {MOST_FIELDS}")
        fields = {name: cls._read(name, value) for name, value in body.items()}
        return {name: value for name, value in fields.items() if value is not IDLE}

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        """The value of a field, or IDLE if it asks for nothing.

        That of a field that is refused is the FieldError: so it is told with what else is wrong.
        """
        if name in cls.model_fields:
            if value is None and not cls.model_fields[name].is_required():
                return IDLE  # as clients write a field that they leave out
            return int(value) if isinstance(value, float) and value.is_integer() else value
        if name in cls.hints:
            return IDLE
        if name in cls.refused:
            idle, advice = cls.refused[name]
        elif name in ROUTER_FIELDS:
            idle, advice = ROUTER_FIELDS[name], "leave it out"
        else:
            return value  # unknown: refused by name
        if value is None or value in idle:
            return IDLE
        return FieldError(name, f"{name} is not supported: {advice}")


class ResponseBody(BaseModel):
    """A response. Those of its fields that are ``optional`` are left out where they are None."""

    optional: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_optional(self, serialize: SerializerFunctionWrapHandler):
        fields = serialize(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in self.optional
        }


class ErrorDetails(ResponseBody):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(ResponseBody):
    error: ErrorDetails
