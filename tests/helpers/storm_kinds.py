"""Requests of every API and many kinds, whose answers a request alone gets again."""

from typing import Any

TOOL_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": TOOL_SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
NAMED = {"name": "thing", "schema": OBJECT}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 9}
NOT = {"chat_template_kwargs": {"enable_thinking": False}}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
LONG = "def compute(x):\n    return x + 1\n\n\n" * 16

type Kind = tuple[str, dict[str, Any]]  # path and body

COMPLETIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    SAMPLED,
    {"temperature": 1, "top_k": 20, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1, "stop": ["\n\n", "return"]},
    {"temperature": 0.7, "n": 3},
    {"temperature": 0, "prompt": LONG},
    {"temperature": 0, "echo": True},
    {"temperature": 1, "repetition_penalty": 1.2, "min_tokens": 4},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z]{5,12}"}},
    {"temperature": 0.9, "min_p": 0.05, "prompt": LONG + "class A", "max_tokens": 48},
]
CHATS: list[dict[str, Any]] = [
    {"temperature": 0, **NOT},
    {**SAMPLED, **NOT},
    {"temperature": 0, **THINKS},
    {**SAMPLED, **THINKS},
    {"temperature": 1, "n": 2, **THINKS},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2, **NOT},
    {"temperature": 0.5, "response_format": {"type": "json_schema", "json_schema": NAMED}, **NOT},
    {"temperature": 0, "tools": TOOLS, "tool_choice": "auto", **NOT},
    {"temperature": 0.9, "tools": TOOLS, "tool_choice": "required", **NOT, "max_tokens": 48},
    {"temperature": 1, "stop": [")", "\n\n"], "frequency_penalty": 0.4, **NOT},
]
RESPONSES: list[dict[str, Any]] = [
    {"temperature": 0, **NOT},
    {**SAMPLED, **THINKS},
    {"temperature": 0, "text": {"format": {"type": "json_schema", **NAMED}}, **NOT},
    {
        "temperature": 0.9,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "max_output_tokens": 48,
        **NOT,
    },
    {"temperature": 0.6, "previous_response_id": "", **NOT},  # the server's, when it is there
]
MESSAGES: list[dict[str, Any]] = [  # without seeds, so greedy ones
    {**NOT},
    {"system": "Be short.", "stop_sequences": ["\n\n"], **NOT},
    {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 24},
    {
        "tools": [{"name": "weather", "description": "Of a city.", "input_schema": TOOL_SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 48,
        **NOT,
    },
]


def kinds(model: str, previous: str) -> list[Kind]:
    """All of them, with seeds.

    Args:
      model: the served name.
      previous: the id of a response that some go on with.
    """
    chat = [{"role": "user", "content": "Write a stack."}]
    found: list[Kind] = []
    for number, fields in enumerate(COMPLETIONS):
        body = {"prompt": "def read_config(path):\n", "max_tokens": 24, "seed": number}
        found.append(("/v1/completions", {**body, **fields}))
    for number, fields in enumerate(CHATS):
        body = {"messages": chat, "max_tokens": 24, "seed": number}
        found.append(("/v1/chat/completions", {**body, **fields}))
    for number, fields in enumerate(RESPONSES):
        body = {"input": "Write a queue.", "max_output_tokens": 24, "seed": number}
        if "previous_response_id" in fields:
            fields = {**fields, "previous_response_id": previous}
        found.append(("/v1/responses", {**body, **fields}))
    for fields in MESSAGES:
        body = {"model": model, "messages": chat, "max_tokens": 24, "temperature": 0}
        found.append(("/v1/messages", {**body, **fields}))
    return found
