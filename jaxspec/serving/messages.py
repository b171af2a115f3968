"""From OpenAI's messages to what chat templates read."""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.serving.effort_trial import EFFORT, THINKING
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ROLES, ChatRequest
from jaxspec.serving.template_trial import ToolUse

# Arguments of apply_chat_template that are no variables of a template.
RESERVED = frozenset(
    {
        *("chat_template", "conversation", "continue_final_message", "documents", "padding"),
        *(
            "add_generation_prompt",
            "max_length",
            "processor_kwargs",
            "return_assistant_tokens_mask",
        ),
        *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
        *("load_audio_from_video", "sampling_rate"),
    }
)
REASONING = ("reasoning_content", "reasoning")


def template_messages(
    messages: Sequence[Mapping[str, Any]], use: ToolUse | None = None
) -> list[dict[str, Any]]:
    """Messages with content as text, and arguments of calls as objects, or as ``use`` says that the
    template takes them.

    Raises FieldError for what is no message, and for what is not text.
    """
    found = [_message(index, message, use) for index, message in enumerate(messages)]
    return found if use is None or not use.single else _one_by_one(found)


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of one call each, with its results: for a template that takes no more in a turn."""
    found, left = [], collections.deque(messages)
    while left:
        turn = left.popleft()
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            found.append(turn)
            continue
        results = []
        while left and left[0]["role"] == "tool":
            results.append(left.popleft())
        for call in calls:
            found.append({**turn, "tool_calls": [call]})
            found += [result for result in results if result.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result.get("tool_call_id") != call.get("id")]
            turn = {"role": "assistant", "content": ""}
        found += results
    return found


def _message(index: int, message: Mapping[str, Any], use: ToolUse | None) -> dict[str, Any]:
    name, role = f"messages.{index}", message.get("role")
    if role not in ROLES:
        raise FieldError(f"{name}.role", f"{name}.role must be one of {', '.join(ROLES)}")
    found = {key: value for key, value in message.items() if value is not None}
    found["role"] = "system" if role == "developer" else role  # templates know no developer
    found["content"] = _content(f"{name}.content", message.get("content"), role)
    if role == "assistant":
        found |= _reasoning(name, message)
    if "tool_calls" in found:
        found["tool_calls"] = _calls(f"{name}.tool_calls", found["tool_calls"])
        found |= {} if use is None else _as_used(found, use)
    return found


def _as_used(message: Mapping[str, Any], use: ToolUse) -> dict[str, Any]:
    """What a template that uses calls so takes in another way."""
    found: dict[str, Any] = {}
    if use.as_text:
        found["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    texts = [text for key in ("reasoning", "content") if (text := message.get(key))]
    if use.joins and len(texts) > 1:
        found |= {"content": ""} | dict.fromkeys(REASONING, "\n".join(texts))
    return found


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as text."""
    function = call["function"]
    given = function["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _content(name: str, content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in ("assistant", "tool"):  # a tool may have nothing to say
        return ""
    if not isinstance(content, list):
        raise FieldError(name, f"{name} must be text, or a list of parts of type text")
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") in ("text", "refusal")):
            raise FieldError(name, f"{name}: only parts of type text are supported")
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise FieldError(name, f"{name}: a part has no text")
        texts.append(text)
    return "\n".join(texts)


def _reasoning(name: str, message: Mapping[str, Any]) -> dict[str, str]:
    """The reasoning of an assistant's message, under both names: templates read either."""
    for key in REASONING:
        text = message.get(key)
        if text is not None and not isinstance(text, str):
            raise FieldError(f"{name}.{key}", f"{name}.{key} must be text")
        if text:
            return dict.fromkeys(REASONING, text)
    return {}


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Calls whose arguments are objects: templates write them as JSON themselves."""
    if not isinstance(calls, list):
        raise FieldError(name, f"{name} must be a list of calls")
    found = []
    for call in calls:
        match call:
            case {"function": {"name": str()} as function}:
                arguments = _arguments(name, function.get("arguments"))
                found.append({**call, "function": {**function, "arguments": arguments}})
            case _:
                raise FieldError(name, f"{name}: a call needs a function with name and arguments")
    return found


def _arguments(name: str, given: Any) -> Any:
    """The arguments of a call that this server or another has written: an object, or text if it is
    no JSON.

    A text that reached its limit of tokens ends in the midst of them.
    """
    if given is None or isinstance(given, Mapping):
        return given or {}
    if not isinstance(given, str):
        raise FieldError(name, f"{name}: the arguments of a call must be text")
    try:
        found = json.loads(given) if given.strip() else {}
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written
    except (ValueError, RecursionError):
        return given
    return found


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no variable of a chat template."""
    wrong = sorted(RESERVED & variables.keys())
    if wrong:
        raise ValueError(f"must not have {wrong[0]}: it is no variable of a template")


def template_variables(
    request: ChatRequest, defaults: Mapping[str, Any], off: Mapping[str, Any]
) -> dict[str, Any]:
    """What a chat template gets beside the messages. Raises FieldError for reserved names.

    Args:
      defaults: of variables that the request does not set.
      off: variables that turn reasoning off, for the effort ``none``; see effort_trial.
    """
    given, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    try:
        check_variables(given)
    except ValueError as error:
        name = "chat_template_kwargs"
        raise FieldError(name, f"{name} {error}") from error
    variables = dict(defaults)
    if effort == "none":
        variables.pop(EFFORT, None)
        variables |= off
    elif effort is not None:
        variables |= {EFFORT: effort, **dict.fromkeys(THINKING, True)}
    variables |= given
    if request.tools and request.tool_choice != "none":
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
    variables["add_generation_prompt"] = request.add_generation_prompt
    variables["continue_final_message"] = request.continue_final_message
    return variables
