"""What each field of vLLM's requests does here: what is sent, and what must come of it.

A check gets what reaches the engine with the field and without it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.llm.completion import TextOptions
from jaxspec.serving.parts import Part
from jaxspec.serving.prepared import PreparedRequest

USER = {"role": "user", "content": "abcabc"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [{"name": "look", "input_schema": SCHEMA}],
}
REQUIRED = {"chat": "required", "responses": "required", "messages": {"type": "any"}}
NO_TOOL = {"chat": "none", "responses": "none", "messages": {"type": "none"}}

# Requests with nothing but what they need.
LEAST: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "abcabc", "max_tokens": 4},
    "chat": {"messages": [USER], "max_tokens": 4},
    "responses": {"input": "abcabc", "max_output_tokens": 4},
    "messages": {"messages": [USER], "max_tokens": 4},
}


@dataclasses.dataclass(frozen=True)
class Reached:
    """What a request has become: for the engine, and the answer as it is at its beginning."""

    prepared: PreparedRequest[Any, Any, Any]
    answer: BaseModel | None = None

    @property
    def prompt(self) -> list[int]:
        return self.prepared.prompts[0]

    @property
    def sampling(self) -> SamplingParams:
        return self.prepared.sampling[0]

    @property
    def options(self) -> TextOptions:
        return self.prepared.options

    def changed(self, other: "Reached") -> set[str]:
        """Names of what is not as in another."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        pairs = {
            name: (getattr(self.sampling, name), getattr(other.sampling, name)) for name in names
        }
        found = {name for name, (mine, others) in pairs.items() if mine != others}
        found |= {"prompt"} if self.prompt != other.prompt else set()
        return found | ({"options"} if self.options != other.options else set())


type Check = Callable[[Reached, Reached], bool]


@dataclasses.dataclass(frozen=True)
class Case:
    """``more`` is sent with the field and without it."""

    value: Any
    check: Check
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def sets(name: str, value: Any) -> Check:
    """The field changes this parameter of sampling alone."""
    return lambda it, plain: it.changed(plain) == {name} and getattr(it.sampling, name) == value


def changes(*names: str) -> Check:
    """The field changes these alone."""
    return lambda it, plain: it.changed(plain) == set(names)


def tells(name: str, value: Any) -> Check:
    """The answer tells the field, which changes nothing else."""
    return lambda it, plain: not it.changed(plain) and getattr(it.answer, name) == value


def same(name: str, value: Any) -> Case:
    return Case(value, sets(name, tuple(value) if isinstance(value, list) else value))


_SAMPLING: dict[str, Case] = {
    **{
        name: same(name, value)
        for name, value in {
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.5,
            "temperature": 0.25,
            "top_p": 0.5,
            "top_k": 7,
            "min_p": 0.25,
            "seed": 9,
            "ignore_eos": True,
        }.items()
    },
    "stop": Case("x", lambda it, plain: it.changed(plain) == {"stop"}),
    "stop_token_ids": Case([7], lambda it, plain: 7 in (it.sampling.stop_token_ids or ())),
    "logit_bias": Case({"7": 1.5}, lambda it, _: dict(it.sampling.logit_bias or {}) == {7: 1.5}),
    "cache_salt": same("cache_salt", "a"),
}
_BOTH: dict[str, Case] = {
    **_SAMPLING,
    "n": same("n", 2),
    "max_tokens": same("max_tokens", 3),
    "min_tokens": same("min_tokens", 2),
    "prompt_logprobs": same("prompt_logprobs", 2),
    "priority": same("priority", 3),
    "allowed_token_ids": Case([7, 8], changes("allowed_token_ids")),
    "bad_words": Case(["x"], changes("bad_token_ids", "bad_sequences")),
    "response_format": Case({"type": "json_object"}, changes("structured")),
    "structured_outputs": Case({"regex": "a+"}, changes("structured")),
    "include_stop_str_in_output": Case(True, lambda it, _: it.options.keep_stop),
    "skip_special_tokens": Case(False, lambda it, _: not it.options.skip_special),
    "truncate_prompt_tokens": Case(3, lambda it, plain: it.prompt == plain.prompt[-3:]),
    "truncation_side": Case("right", changes("prompt"), {"truncate_prompt_tokens": 2}),
}


def _tools(api: str) -> dict[str, Case]:
    tools = {"tools": TOOLS[api]}
    return {
        "tools": Case(TOOLS[api], lambda it, plain: {"prompt", "structured"} <= it.changed(plain)),
        "tool_choice": Case(NO_TOOL[api], lambda it, _: it.sampling.structured is None, tools),
    }


_PARALLEL = Case(False, changes("structured"), {"tools": TOOLS["chat"], "tool_choice": "required"})
_OTHER = {"role": "user", "content": "other"}
_KWARGS = Case({"mood": "glad"}, changes("prompt"))

CASES: dict[str, dict[str, Case]] = {
    "completions": {
        **_BOTH,
        "prompt": Case("other", changes("prompt")),
        "logprobs": same("logprobs", 2),
        "echo": Case(True, lambda it, _: it.prepared.echoed(0) == "abcabc"),  # type: ignore
    },
    "chat": {
        **_BOTH,
        **_tools("chat"),
        "messages": Case([_OTHER], changes("prompt")),
        "max_completion_tokens": Case(3, sets("max_tokens", 3)),
        "logprobs": Case(True, sets("logprobs", 0)),
        "top_logprobs": Case(3, sets("logprobs", 3), {"logprobs": True}),
        "parallel_tool_calls": _PARALLEL,
        "reasoning_effort": Case("low", changes("prompt")),
        "thinking_token_budget": Case(5, changes("reasoning_budget")),
        "include_reasoning": Case(
            False,
            lambda it, _: it.prepared.shown([Part("a", reasoning=True)]) == [],  # type: ignore
        ),
        "add_generation_prompt": Case(False, changes("prompt")),
        "continue_final_message": Case(
            True,
            changes("prompt"),
            {
                "messages": [USER, {"role": "assistant", "content": "ab"}],
                "add_generation_prompt": False,
            },
        ),
        "chat_template_kwargs": _KWARGS,
    },
    "responses": {
        **_SAMPLING,
        **_tools("responses"),
        "input": Case("other", changes("prompt")),
        "instructions": Case("be brief", changes("prompt")),
        "max_output_tokens": Case(3, sets("max_tokens", 3)),
        "max_tool_calls": Case(2, tells("max_tool_calls", 2)),
        "metadata": Case({"a": "b"}, tells("metadata", {"a": "b"})),
        "user": Case("me", tells("user", "me")),
        "prompt_cache_key": Case("k", tells("prompt_cache_key", "k")),
        "safety_identifier": Case("s", tells("safety_identifier", "s")),
        "store": Case(False, tells("store", False)),
        "include": Case(["message.output_text.logprobs"], sets("logprobs", 0)),
        "top_logprobs": Case(3, sets("logprobs", 3), {"include": ["message.output_text.logprobs"]}),
        "parallel_tool_calls": dataclasses.replace(
            _PARALLEL, more={"tools": TOOLS["responses"], "tool_choice": "required"}
        ),
        "priority": same("priority", 3),
        "text": Case({"format": {"type": "json_object"}}, changes("structured")),
        "reasoning": Case({"effort": "low"}, changes("prompt")),
        "chat_template_kwargs": _KWARGS,
    },
    "messages": {
        **{name: _SAMPLING[name] for name in ("temperature", "top_k", "top_p", "cache_salt")},
        **_tools("messages"),
        "messages": Case([_OTHER], changes("prompt")),
        "system": Case("be brief", changes("prompt")),
        "max_tokens": same("max_tokens", 3),
        "stop_sequences": Case(["x"], changes("stop")),
        "output_config": Case({"effort": "low"}, changes("prompt")),
        "thinking": Case(
            {"type": "enabled", "budget_tokens": 1024},
            lambda it, _: it.sampling.reasoning_budget is not None,
            {"max_tokens": 2000},
        ),
        "chat_template_kwargs": _KWARGS,
    },
}

# Fields that change nothing, neither here nor with vLLM: they name the caller or the request, or
# are for OpenAI's own servers.
HINTS: dict[str, dict[str, Any]] = {
    "completions": {"user": "me", "request_id": "r", "session_id": "s"},
    "chat": {"user": "me", "request_id": "r", "session_id": "s"},
    "responses": {
        "request_id": "r",
        "session_id": "s",
        "service_tier": "flex",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h",
    },
    "messages": {"metadata": {"user_id": "me"}},
}

# Values that ask for what there is not. Each is refused, and its field named.
_REFUSED: dict[str, Any] = {
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "mm_payload": "none",
    "return_mm_kwargs": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
_REFUSED_MEDIA = {"media_io_kwargs": {"a": {}}, "mm_processor_kwargs": {"a": 1}}
_REFUSED_OF_BOTH = {
    **_REFUSED,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "spaces_between_special_tokens": False,
    "logprob_token_ids": [7],
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
    "routed_experts_prompt_start": 1,
    "return_token_offsets": True,
    "repetition_detection": {"max_pattern_size": 3},
    "stream_interval": 8,
}
REFUSED: dict[str, dict[str, Any]] = {
    "completions": {
        **_REFUSED_OF_BOTH,
        "add_special_tokens": False,
        "suffix": "a",
        "prompt_embeds": "a",
        "thinking_token_budget": 5,
    },
    "chat": {
        **_REFUSED_OF_BOTH,
        **_REFUSED_MEDIA,
        "add_special_tokens": True,
        "chat_template": "a",
        "documents": [{"a": "b"}],
        "echo": True,
        "return_prompt_text": True,
    },
    "responses": {
        **_REFUSED,
        **_REFUSED_MEDIA,
        "background": True,
        "enable_response_messages": True,
        "include_reasoning": False,
        "include_stop_str_in_output": True,
        "previous_input_messages": [USER],
        "prompt": {"id": "a"},
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "structured_outputs": {"regex": "a"},
        "truncation": "auto",
    },
    "messages": _REFUSED,
    "tokenize": {**_REFUSED_MEDIA, "chat_template": "a"},
}
