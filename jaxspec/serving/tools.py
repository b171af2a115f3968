"""Which tools the text of a request may call, and how it calls them."""

from jaxspec.llm.llm import LLM
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import AllowedTools, ChatRequest, NamedTool, Tool


def offered_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the text may call. Raises FieldError for fields that do not go together."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools.{index}.function.name"
            raise FieldError(field, f"{field}: two tools have the same name, {name!r}")
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools
    if not tools:
        raise FieldError("tool_choice", "tool_choice needs tools")
    match choice:
        case NamedTool():
            chosen = [choice.function.name]
        case AllowedTools():
            chosen = [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            return tools
    for name in chosen:
        if name not in names:
            raise FieldError("tool_choice", f"tool_choice: there is no tool {name!r}")
    return [tool for tool in tools if tool.function.name in chosen]


def is_free(request: ChatRequest) -> bool:
    """Whether the text of a request with tools may be without a call."""
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "auto"
    return choice in (None, "auto")


def call_token(llm: LLM, trigger: str) -> int | None:
    """The token that begins calls in the midst of text; None: the tokenizer has added none."""
    [tokens] = llm.tokenize([trigger], special=False)
    return (
        tokens[0] if len(tokens) == 1 and tokens[0] in llm.tokenizer.added_tokens_decoder else None
    )


def earlier_calls(request: ChatRequest) -> int:
    """The number of calls in the conversation so far."""
    calls = [message.get("tool_calls") for message in request.messages]
    return sum(len(each) for each in calls if isinstance(each, list))
