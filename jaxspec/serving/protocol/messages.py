"""`/v1/messages`, Anthropic's."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, field_validator, model_validator

from jaxspec.serving.protocol.base import (
    REFUSED_EVERYWHERE,
    FieldError,
    Refused,
    RequestBody,
    ResponseBody,
)
from jaxspec.serving.protocol.chat import MOST_TOOLS, FunctionName
from jaxspec.serving.protocol.kinds import MOST_ITEMS, Echoed, of_kind
from jaxspec.serving.protocol.sampling import MOST_SALT_CHARACTERS, Stops, in_range, stated

LEAST_BUDGET = 1024
# Fields that change no text, or are hints to Anthropic's caches, queues and places.
IGNORED = frozenset(
    {
        *("cache_control", "context_management", "metadata", "betas", "container", "diagnostics"),
        *("inference_geo", "request_id", "service_tier", "speed", "user_profile_id"),
        "workspace_id",
    }
)
# Of tools. Those that are to be loaded later are there from the beginning.
IGNORED_OF_TOOLS = frozenset(
    {
        *("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming"),
        "input_examples",
    }
)


def _blocks(value: Any) -> Any:
    """Text is one block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Echoed):
    type: Literal["text"]
    text: str


type Text = Annotated[TextBlock, of_kind("blocks", {"text": TextBlock})]
type Texts = Annotated[
    list[Text],
    FailFast(),
    Field(max_length=MOST_ITEMS),
    BeforeValidator(_blocks, json_schema_input_type=str | list[Text]),
]


class ToolUseBlock(Echoed):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Echoed):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = False


class ThinkingBlock(Echoed):
    """Whatever its signature is."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Echoed):
    """Thinking of another server, which alone can read it: there is nothing to go on from."""

    type: Literal["redacted_thinking"]


BLOCKS = MappingProxyType(
    {
        "text": TextBlock,
        "tool_use": ToolUseBlock,
        "tool_result": ToolResultBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    }
)
OF_USER = {name: BLOCKS[name] for name in ("text", "tool_result")}
OF_ASSISTANT = {name: kind for name, kind in BLOCKS.items() if name != "tool_result"}
type UserBlock = Annotated[TextBlock | ToolResultBlock, of_kind("a user's blocks", OF_USER)]
type AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
    of_kind("an assistant's blocks", OF_ASSISTANT),
]


class UserMessage(Echoed):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock],
        FailFast(),
        Field(max_length=MOST_ITEMS),
        BeforeValidator(_blocks, json_schema_input_type=str | list[UserBlock]),
    ]


class AssistantMessage(Echoed):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        FailFast(),
        Field(max_length=MOST_ITEMS),
        BeforeValidator(_blocks, json_schema_input_type=str | list[AssistantBlock]),
    ]


class SystemMessage(Echoed):
    """Also in the midst of a conversation."""

    role: Literal["system"]
    content: Texts


ROLES = MappingProxyType(
    {"user": UserMessage, "assistant": AssistantMessage, "system": SystemMessage}
)
type AnyMessage = Annotated[
    UserMessage | AssistantMessage | SystemMessage, of_kind("messages", ROLES, key="role")
]


class CustomTool(RequestBody):
    hints: ClassVar = IGNORED_OF_TOOLS

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(RequestBody):
    """``name`` belongs to ``tool`` alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(RequestBody):
    hints: ClassVar = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=LEAST_BUDGET)

    @model_validator(mode="after")
    def _has_a_budget(self) -> "Thinking":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise FieldError(
                "thinking.budget_tokens", "thinking.budget_tokens belongs to the type enabled"
            )
        return self


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    effort: str | None = None
    format: OutputFormat | None = None


type Tools = Annotated[
    list[Annotated[CustomTool, of_kind("tools", {"custom": CustomTool}, "custom")]],
    FailFast(),
    Field(max_length=MOST_TOOLS),
]


class CountRequest(RequestBody):
    """`/v1/messages/count_tokens`: what becomes a prompt."""

    hints: ClassVar = IGNORED
    refused: ClassVar[Refused] = MappingProxyType(
        {
            **REFUSED_EVERYWHERE,
            "fallbacks": (([],), "leave it out"),
            "mcp_servers": (([],), "give tools of your own"),
        }
    )

    model: str | None = None
    messages: Annotated[list[AnyMessage], FailFast(), Field(min_length=1, max_length=MOST_ITEMS)]
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as older clients give output_config.format
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's; they win over ``thinking``
    thread: dict[str, Any] | None = None  # refused such that clients do without it


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Stops | None = None
    temperature: float | None = stated(minimum=0)
    top_p: float | None = stated(exclusiveMinimum=0, maximum=1)
    top_k: int | None = None
    # vLLM's
    cache_salt: str | None = Field(None, min_length=1, max_length=MOST_SALT_CHARACTERS)
    stream: bool | None = False

    _in_range = field_validator("temperature", "top_p", "cache_salt")(in_range)


class MessagesUsage(ResponseBody):
    """The prompt has as many tokens as the sum of those that are input."""

    input_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens: int = 0


class MessageObject(ResponseBody):
    """A message, at the beginning of a stream without content.

    ``weight_version`` is no field of Anthropic's: it is there where an admin may change the
    weights.
    """

    optional: ClassVar = frozenset({"weight_version"})

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = Field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    weight_version: str | None = None


class TokenCount(ResponseBody):
    input_tokens: int
