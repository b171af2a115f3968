"""`/v1/chat/completions`."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field

from jaxspec.serving.protocol.base import REFUSED, Refused, RequestBody, ResponseBody
from jaxspec.serving.protocol.kinds import of_kind
from jaxspec.serving.protocol.sampling import Choice, GeneratedResponse, SamplingFields

MOST_TOOLS = 128
# OpenAI's are at most 64 characters; Anthropic's, such as those of MCP servers, 128.
type FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]


class Function(RequestBody):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true: a schema that cannot be enforced is an error


class Tool(RequestBody):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(RequestBody):
    name: str


class NamedTool(RequestBody):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedFunctions(RequestBody):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ROLES = ("system", "developer", "user", "assistant", "tool")
# A turn, read in serving/messages.py.
type Message = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"properties": {"role": {"enum": [*ROLES]}}, "required": ["role"]}),
]
CHOICES = MappingProxyType({"function": NamedTool, "allowed_tools": AllowedTools})
type ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    of_kind("choices", CHOICES, "function", words=("none", "auto", "required")),
]
type Tools = Annotated[list[Tool], FailFast(), Field(max_length=MOST_TOOLS)]


class ChatRequest(SamplingFields):
    refused: ClassVar[Refused] = MappingProxyType(
        {
            **REFUSED,
            "add_special_tokens": ((False,), "the chat template has the special tokens"),
            "audio": ((), "only text is generated"),
            "best_of": ((1,), "use n"),
            "chat_template": ((), "give it to the server, with --chat-template"),
            "documents": (([],), "put them into a message"),
            "echo": ((False,), "use /v1/completions"),
            "function_call": ((), "use tool_choice"),
            "functions": (([],), "use tools"),
            "modalities": ((["text"],), "only text is generated"),
            "moderation": ((), "leave it out"),
            "return_prompt_text": ((False,), "use /tokenize, with return_token_strs"),
            "prediction": ((), "the server drafts by itself: leave it out"),
            "web_search_options": ((), "give a tool of your own"),
        }
    )

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool | None = True  # false: it is generated, and not sent
    separate_reasoning: bool | None = True  # false: it stays in the content
    thinking_token_budget: int | None = Field(None, ge=-1)  # vLLM's; -1: none
    max_thinking_tokens: int | None = Field(None, ge=0)  # SGLang's


class TopLogprob(ResponseBody):
    """``bytes`` are the token's, also of a part of a character, whose ``token`` has U+FFFD."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    content: list[ChatLogprob]


class FunctionCall(ResponseBody):
    optional: ClassVar = frozenset({"name"})

    name: str | None = None  # in a stream: in the call's first chunk
    arguments: str = ""


class ToolCall(ResponseBody):
    optional: ClassVar = frozenset({"index", "id", "type"})

    index: int | None = None  # in a stream
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(ResponseBody):
    """Reasoning has two names: vLLM's, and that of DeepSeek and SGLang."""

    optional: ClassVar = frozenset({"tool_calls", "reasoning", "reasoning_content"})

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(ResponseBody):
    optional: ClassVar = frozenset(
        {"role", "content", "tool_calls", "reasoning", "reasoning_content"}
    )

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """``message`` of a whole answer, ``delta`` of a chunk."""

    optional: ClassVar = Choice.optional | {"message", "delta"}

    message: ChatMessage | None = None
    delta: ChatDelta | None = None
    logprobs: ChatLogprobs | None = None


class ChatResponse(GeneratedResponse):
    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[ChatChoice]
