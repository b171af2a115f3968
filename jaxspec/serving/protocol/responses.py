"""`/v1/responses`."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field

from jaxspec.serving.protocol.base import (
    HINTS,
    REFUSED_EVERYWHERE,
    Refused,
    RequestBody,
    ResponseBody,
)
from jaxspec.serving.protocol.chat import MOST_TOOLS, FunctionName
from jaxspec.serving.protocol.kinds import MOST_ITEMS, Echoed, of_kind
from jaxspec.serving.protocol.sampling import SamplingControls

# What may be asked for beside the answer. Reasoning is sent as it is, never encrypted.
LOGPROBS = "message.output_text.logprobs"
type Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


def _parts(value: Any) -> Any:
    """Text is one part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _items(value: Any) -> Any:
    """Text is what the user says."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextPart(Echoed):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(Echoed):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


TEXTS = MappingProxyType({"input_text": TextPart, "output_text": TextPart, "text": TextPart})
type Part = Annotated[TextPart | RefusalPart, of_kind("parts", {**TEXTS, "refusal": RefusalPart})]
type Parts = Annotated[
    list[Part],
    FailFast(),
    Field(max_length=MOST_ITEMS),
    BeforeValidator(_parts, json_schema_input_type=str | list[Part]),
]
type ReasoningText = Annotated[
    TextPart, of_kind("parts", {"reasoning_text": TextPart, "summary_text": TextPart})
]


class MessageItem(Echoed):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class ReasoningItem(Echoed):
    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None  # of another server, which alone can read it


class CallItem(Echoed):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Echoed):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


ITEMS = MappingProxyType(
    {
        "message": MessageItem,
        "reasoning": ReasoningItem,
        "function_call": CallItem,
        "function_call_output": CallOutputItem,
    }
)
type Item = Annotated[
    MessageItem | ReasoningItem | CallItem | CallOutputItem, of_kind("items", ITEMS, "message")
]
type Items = Annotated[
    list[Item],
    FailFast(),
    Field(min_length=1, max_length=MOST_ITEMS),
    BeforeValidator(_items, json_schema_input_type=str | list[Item]),
]


class FunctionTool(RequestBody):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


TOOLS = MappingProxyType({"function": FunctionTool})
type Tools = Annotated[
    list[Annotated[FunctionTool, of_kind("tools", TOOLS)]],
    FailFast(),
    Field(max_length=MOST_TOOLS),
]


class NamedTool(RequestBody):
    type: Literal["function"]
    name: str


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedTool, of_kind("tools", {"function": NamedTool})]] = Field(
        min_length=1, max_length=MOST_TOOLS
    )


CHOICES = MappingProxyType({"function": NamedTool, "allowed_tools": AllowedTools})
WORDS = ("none", "auto", "required")
type ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    of_kind("choices", CHOICES, words=WORDS),
]


class TextFormat(RequestBody):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestBody):
    """``schema`` is the JSON schema. With ``strict`` it is an error to hold what cannot be
    enforced; ``name`` and ``description`` change nothing."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    name: str = "response"
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


FORMATS = MappingProxyType(
    {"text": TextFormat, "json_object": TextFormat, "json_schema": JsonSchemaFormat}
)


class TextOptions(RequestBody):
    format: Annotated[TextFormat | JsonSchemaFormat, of_kind("formats", FORMATS)] | None = None


class Reasoning(RequestBody):
    """Reasoning is sent as it is: there are no summaries of it."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(RequestBody):
    include_obfuscation: bool = False  # padding against listeners: there is none


class ResponsesRequest(SamplingControls):
    hints: ClassVar = HINTS - {"include_reasoning", "separate_reasoning"} | {"prompt_cache_options"}
    refused: ClassVar[Refused] = MappingProxyType(
        {
            **REFUSED_EVERYWHERE,
            "background": ((False,), "wait for the response, or stream it"),
            "context_management": (([],), "shorten the input"),
            "conversation": ((), "use previous_response_id"),
            "enable_response_messages": ((False,), "use /v1/chat/completions"),
            "include_reasoning": ((True,), "leave out the items of reasoning"),
            "include_stop_str_in_output": ((False,), "use /v1/chat/completions"),
            "max_tokens": ((), "use max_output_tokens"),
            "messages": ((), "use input"),
            "moderation": ((), "leave it out"),
            "n": ((1,), "ask several times"),
            "previous_input_messages": ((), "use input"),
            "prompt": ((), "give instructions and input"),
            "reasoning_effort": ((), "use reasoning.effort"),
            "response_format": ((), "use text.format"),
            "spaces_between_special_tokens": ((True,), "leave it out"),
            "structured_outputs": ((), "use text.format"),
            "truncation": (("disabled",), "shorten the input"),
        }
    )

    model: str | None = None
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = None  # of tools of the server, of which there are none
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)  # as in chats
    include: list[Include] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: bool | None = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class InputTokensDetails(ResponseBody):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(ResponseBody):
    """A response, at the beginning of a stream without output and usage.

    ``weight_version`` is no field of OpenAI's: it is there where an admin may change the weights.
    """

    optional: ClassVar = frozenset({"weight_version"})

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    background: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    weight_version: str | None = None


class InputItems(ResponseBody):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedResponse(ResponseBody):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
