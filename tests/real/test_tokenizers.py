"""Tools and structured outputs with published tokenizers, read from the package maxtext."""

import functools
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler, Matcher
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.tool_formats.table import FORMATS, told_format
from jaxspec.serving.tool_grammar import ToolGrammar
from jaxspec.serving.tools import offered_tools
from tests.helpers.structured_outputs import legal
from tests.real.packages import file_of
from tests.real.sentencepiece import tokenizer_json

pytestmark = pytest.mark.real

VOCAB = 151_936  # of Qwen3's logits: more than the tokenizer has
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo <b> <think>"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "now"}},
    ],
}


@functools.cache
def qwen3() -> Tokenizer:
    return Tokenizer.from_file(str(file_of("maxtext", "qwen3-tokenizer/tokenizer.json")))


@functools.cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(qwen3().to_str(), VOCAB, [qwen3().get_vocab()["<|im_end|>"]])


def is_legal(matcher: Matcher, token: int) -> bool:
    return bool(matcher.mask()[token // 32] >> np.uint32(token % 32) & 1)


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the text, in the tokens that the tokenizer makes of it, is a whole output."""
    matcher = matcher.copy()
    for token in qwen3().encode(text, add_special_tokens=False).ids:
        if not is_legal(matcher, token):
            return False
        matcher.advance([token])
    return matcher.complete


@pytest.mark.parametrize("choice", ["auto", "required", "now"])
def test_tools_are_called_as_the_template_of_qwen3_says(choice: str):
    named = {"type": "function", "function": {"name": "now"}}
    body = BODY | {"tool_choice": named if choice == "now" else choice}
    config = json.loads(file_of("maxtext", "qwen3-tokenizer/tokenizer_config.json").read_text())
    request = ChatRequest.model_validate(body)
    form = FORMATS[told_format(config["chat_template"])]
    spec = ToolGrammar(request, offered_tools(request), form).compiled(grammars())
    matcher, marker = grammars().matcher(spec), qwen3().get_vocab()["<tool_call>"]
    assert is_legal(matcher, marker)
    assert takes(matcher, NOW) and takes(matcher, f"\n\n{NOW}")
    assert takes(matcher, CALL) == (choice != "now")
    assert takes(matcher, f"{CALL}\n{NOW}") == (choice != "now")
    assert takes(matcher, "It is 5 <b>o'clock</b>.") == (choice == "auto")
    assert takes(matcher, f"Let me see.\n{CALL}") == (choice == "auto")
    assert not takes(matcher, NOW.replace("{}", '{"zone": "UTC"}'))
    assert not takes(matcher, CALL.replace("weather", "news"))
    matcher.advance([marker])
    assert legal(matcher) == qwen3().encode("\n").ids, "nothing else may come next"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (StructuredOutput(json_schema=CITY), '{"city": "<think>Oslo</think>"}'),
        (StructuredOutput(json_schema={"enum": ["<tool_call>", "b"]}), '"<tool_call>"'),
        (StructuredOutput(regex="<think>[a-z]*</think>"), "<think>so</think>"),
        (StructuredOutput(choice=("a <|repo_name|>", "b")), "a <|repo_name|>"),
        (StructuredOutput(json_schema=CITY, blank_line=True), '\n\n{"city": "Oslo"}'),
    ],
    ids=["json", "enum", "regex", "choice", "blank line"],
)
def test_structured_text_has_the_tokens_that_the_tokenizer_makes_of_it(
    spec: StructuredOutput, text: str
):
    assert takes(grammars().matcher(spec), text)


def test_the_text_of_special_tokens_can_be_written():
    spec = StructuredOutput(choice=("a <|im_start|>",))
    matcher, found = grammars().matcher(spec), []
    while not matcher.complete:
        found.append(legal(matcher)[-1])
        matcher.advance(found[-1:])
    assert qwen3().decode(found, skip_special_tokens=True) == "a <|im_start|>"


HTML = ["<table>", "</table>", "<td>", "<h1>", "</blockquote>", "<strong>", "<b>", "<code>"]


def test_structured_text_may_have_the_html_of_gemma_3():
    text = tokenizer_json(file_of("maxtext", "tokenizers/tokenizer.gemma3"))
    added = {token["content"]: token for token in json.loads(text)["added_tokens"]}
    end = added["<eos>"]["id"]
    own = GrammarCompiler(text, len(json.loads(text)["model"]["vocab"]), [end])
    ids = [added[word]["id"] for word in HTML]
    assert not any(added[word]["special"] for word in HTML)
    for spec, before in (
        (StructuredOutput(json_schema={"type": "string"}), '"'),
        (StructuredOutput(regex="(.|\n)*"), "x"),
        (StructuredOutput(choice=tuple(HTML)), ""),
    ):
        matcher = own.matcher(spec)
        matcher.advance([json.loads(text)["model"]["vocab"][piece] for piece in before])
        for token in ids:
            assert is_legal(matcher, token)
        assert not is_legal(matcher, added["<bos>"]["id"])
