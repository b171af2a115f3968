"""Chats with a model whose tokenizer has added tokens, as Qwen's and Gemma's: from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from jaxspec import LLM
from jaxspec.config.engine import EngineConfig
from tests.helpers.engines import CHAIN
from tests.helpers.marks import slow
from tests.helpers.random_models import save_random_target
from tests.helpers.served import MODEL, ask
from tests.helpers.small_tokenizers import byte_level, with_markup

TOKENIZER = with_markup(byte_level())
IDS = TOKENIZER.get_vocab()
END, CALL, CLOSE = IDS["<|im_end|>"], IDS["<tool_call>"], IDS["</tool_call>"]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "<b>Oslo"]}}}
CITY |= {"required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
REQUEST = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "abc"}],
    "max_completion_tokens": 120,
    "temperature": 0,
    "logit_bias": {END: 0},  # so all requests run in the same programs
    "extra_body": {"return_token_ids": True},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("markup")
    size = TOKENIZER.get_vocab_size()
    save_random_target(path, vocab_size=size, stop_token_ids=(END,))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<|im_end|>")
    fast.save_pretrained(Path(path))
    config = EngineConfig(max_rows=1, rounds_per_call=1)
    options: Any = {"speculation": CHAIN, "max_length": 256, "page_size": 8}
    return LLM(path, "ngram", engine=config, **options)


def answer(llm: LLM, **fields: Any) -> Any:
    """The one choice of a chat; a stream of the same request has the same content and calls."""
    request = {**REQUEST, **fields}
    whole, chunks = ask(llm, request, {**request, "stream": True})
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    [choice] = whole.choices
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
    calls = [part.function for delta in deltas for part in delta.tool_calls or []]
    wanted = [one.function for one in choice.message.tool_calls or []]
    assert [one.name for one in calls if one.name] == [one.name for one in wanted]
    assert "".join(one.arguments for one in calls) == "".join(one.arguments for one in wanted)
    return choice


@pytest.mark.parametrize("choice", ["auto", slow("required"), "weather"])
def test_a_tool_is_called_with_the_marker_tokens(llm: LLM, choice: str):
    named = {"type": "function", "function": {"name": "weather"}}
    found = answer(
        llm,
        tools=TOOLS,
        tool_choice=named if choice == "weather" else choice,
        parallel_tool_calls=False,
        logit_bias={CALL: 100, END: 50} if choice == "auto" else REQUEST["logit_bias"],
    )
    assert found.finish_reason == "tool_calls" and found.message.content is None
    [call] = found.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "<b>Oslo")
    else:
        assert choice != "weather" and arguments == {}
    tokens = [token for token in found.token_ids if token in (CALL, CLOSE)]
    assert tokens == [CALL, CLOSE]


def test_a_tool_without_parameters_is_called_with_nothing(llm: LLM):
    named = {"type": "function", "function": {"name": "now"}}
    found = answer(llm, tools=TOOLS, tool_choice=named)
    [call] = found.message.tool_calls
    assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("strict", [False, True])
def test_free_text_may_have_markup(llm: LLM, strict: bool, monkeypatch: pytest.MonkeyPatch):
    scheduler, plans = llm.engine.scheduler, []
    plan = scheduler.plan
    monkeypatch.setattr(
        scheduler,
        "plan",
        lambda *args, **options: plans.append(plan(*args, **options)) or plans[-1],
    )
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": strict}}]
    found = answer(llm, tools=tools, logit_bias={IDS["<table>"]: 100}, max_completion_tokens=4)
    assert found.message.content == "<table>" * 4 and found.message.tool_calls is None
    is_masked = any(each.masked_rows for each in plans)
    assert any(each.decode_rows for each in plans) != is_masked == strict, (
        "a call of a strict tool may not be spelled in other tokens"
    )


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_structured_text_may_have_markup(llm: LLM):
    bias = {IDS["<b>"]: 100}
    schema = {"type": "string", "maxLength": 9}
    found = answer(llm, response_format=response_format(schema), logit_bias=bias)
    assert json.loads(found.message.content) == "<b><b><b>"
    assert found.token_ids.count(IDS["<b>"]) == 3
    outputs = {"structured_outputs": {"regex": "(<b>|x){3}"}, "return_token_ids": True}
    found = answer(llm, extra_body=outputs, logit_bias=bias)
    assert found.message.content == "<b><b><b>"
    assert found.token_ids[:3] == [IDS["<b>"]] * 3


@pytest.mark.parametrize("blank", ["\n\n", "Ċ"])
def test_a_blank_line_before_json_is_no_part_of_the_answer(llm: LLM, blank: str):
    found = answer(
        llm,
        response_format=response_format({"enum": [1, 22]}),
        logit_bias={IDS[blank]: 100},
    )
    assert found.message.content in ("1", "22") and found.finish_reason == "stop"
    assert found.token_ids[0] == IDS[blank]
    outputs = {"structured_outputs": {"regex": "\n{2}[a-c]"}}
    kept = answer(llm, extra_body=outputs)
    assert kept.message.content.startswith("\n\n"), "a regex says what there is"
