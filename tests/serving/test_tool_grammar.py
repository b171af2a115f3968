"""What a text with tools must look like: arguments, strict tools, and tokens that are markers."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from jaxspec.engine.structured import GrammarCompiler, Matcher
from jaxspec.serving import tool_grammar as tool_grammar_module
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.tool_formats.table import FORMATS
from jaxspec.serving.tool_grammar import ToolGrammar
from jaxspec.serving.tools import offered_tools
from tests.helpers.small_tokenizers import byte_level, with_markup
from tests.helpers.structured_outputs import compiler, legal, takes

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: Any = None, **other: Any) -> dict[str, Any]:
    return {"function": {"name": name, "parameters": parameters, **other}}


def matcher_of(
    *tools: dict[str, Any],
    grammars: GrammarCompiler | None = None,
    form: str = "hermes",
    whitespace: bool = True,
    **fields: Any,
) -> Matcher:
    body = {"messages": [{"role": "user"}], "tool_choice": "required", "tools": list(tools)}
    request = ChatRequest.model_validate(body | fields)
    own = grammars or compiler()
    grammar = ToolGrammar(request, offered_tools(request), FORMATS[form], whitespace=whitespace)
    return own.matcher(grammar.compiled(own))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"properties": {}}, {"type": "object", "properties": {}, "required": []}],
)
def test_a_tool_without_parameters_takes_no_arguments(parameters: Any):
    matcher = matcher_of(tool("now", parameters))
    assert takes(matcher, call("now", "{}"))
    assert not takes(matcher, call("now", '{"zone": "UTC"}'))


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object"}, '{"a": 1}'),
        ({"type": "object", "properties": {}, "additionalProperties": True}, '{"a": 1}'),
        ({"properties": {}, "patternProperties": {"^a": {"type": "integer"}}}, '{"a": 1}'),
        ({"properties": {}, "required": ["a"]}, '{"a": 1}'),
        ({"properties": {"a": {"type": "integer"}}}, "{}"),
    ],
)
def test_what_a_schema_says_of_others_counts(parameters: Any, arguments: str):
    matcher = matcher_of(tool("now", parameters))
    assert takes(matcher, call("now", arguments))
    assert not takes(matcher, call("now", "[1]")) and not takes(matcher, call("now", "null"))


# Properties whose schemas cannot be enforced, and values that must be possible then.
LOOSE: dict[str, tuple[Any, str]] = {
    "names": ({"type": "object", "propertyNames": {"maxLength": 2}}, '{"abc": 1}'),
    "not": ({"type": "string", "not": {"const": "a"}}, '"b"'),
    "format": ({"type": "string", "format": "password"}, '"b"'),
    "unique": ({"type": "array", "uniqueItems": True}, "[1, 2]"),
    "condition": ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"ab"'),
    "look-ahead": ({"type": "string", "pattern": "^(?!a).*$"}, '"b"'),
    "missing": ({"$ref": "#/x/y"}, '"b"'),
    "external": ({"$ref": "https://json.schemastore.org/package.json"}, "{}"),
    "counted": ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, '{"a": 1}'),
    "does not compile": ({"type": "any"}, '"b"'),
    "no regex": ({"type": "string", "pattern": r"\cA("}, '"b"'),
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_tool_is_never_refused_for_its_schema_unless_it_is_strict(name: str):
    schema, value = LOOSE[name]
    parameters = {"type": "object", "properties": {"q": schema, "n": {"type": "integer"}}}
    for choice in ("auto", "required"):
        matcher = matcher_of(tool("good", CITY), tool("bad", parameters), tool_choice=choice)
        assert takes(matcher, call("bad", f'{{"q": {value}, "n": 1}}'))
        assert takes(matcher, call("good", '{"city": "Oslo"}'))
        assert not takes(matcher, call("good", "{}")), "the other tool stays what it is"
    if name == "format":
        return
    with pytest.raises(FieldError) as error:
        matcher_of(tool("good", CITY), tool("bad", parameters, strict=True))
    assert error.value.param == "tools.1.function.parameters"
    assert str(error.value).startswith("tools.1.function.parameters: ")


def test_what_can_be_enforced_stays_enforced():
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "q": {"not": {"a": 1}}},
    }
    matcher = matcher_of(tool("bad", parameters))
    assert not takes(matcher, call("bad", '{"n": "x"}'))
    spaced = [takes(matcher, call("bad", '{"n":' + " " * count + "1}")) for count in range(3)]
    assert spaced == [True, True, False], "white space is bounded"


def test_a_grammar_is_known_once_it_is_compiled():
    body = {"messages": [{"role": "user"}], "tools": [tool("only_here", CITY)]}
    request, grammars = ChatRequest.model_validate(body), compiler()
    grammar = ToolGrammar(request, offered_tools(request), FORMATS["hermes"])
    assert grammar.known(grammars) is None
    assert grammar.known(grammars) is None, "asking compiles nothing"
    assert grammar.compiled(grammars) == grammar.known(grammars)


def test_the_named_tool_has_its_place_among_all():
    named = {"type": "function", "function": {"name": "bad"}}
    bad = tool("bad", {"type": "array", "uniqueItems": True}, strict=True)
    with pytest.raises(
        FieldError, match=r"^tools\.1\.function\.parameters: uniqueItems cannot be "
    ):
        matcher_of(tool("good"), bad, tool_choice=named)


def test_tools_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_grammar_module, "MOST_SECONDS", 0)
    with pytest.raises(FieldError, match="too long to compile: make them smaller") as error:
        matcher_of(tool("f", {"type": "object", "properties": {"a": {"type": "any"}}}))
    assert error.value.param == "tools"


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_at_most_two_line_breaks_come_before_a_call_that_must_be(form: str):
    text = call("now", "{}") if form == "hermes" else '{"name": "now", "parameters": {}}'
    matcher = matcher_of(tool("now"), form=form)
    assert [takes(matcher, "\n" * count + text) for count in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_markers_may_be_tokens(special: bool, choice: str):
    """As in Qwen's tokenizer, where they are not special, and in Hermes's, where they are."""
    own = json.loads(with_markup(byte_level()).to_str())
    ids = {token["content"]: token["id"] for token in own["added_tokens"]}
    for token in own["added_tokens"]:
        token["special"] |= special and token["content"] in ("<tool_call>", "</tool_call>")
    end = ids["<|im_end|>"]
    grammars = GrammarCompiler(json.dumps(own), 500, [end])
    words = LLTokenizer(json.dumps(own), eos_token=end)
    matcher = matcher_of(tool("now"), tool("f", CITY), grammars=grammars, tool_choice=choice)
    texts = [call("now", "{}"), call("f", '{"city": "<b>Oslo</b>"}')]
    tokens = words.tokenize_str("\n".join(texts), parse_special=True)
    assert [tokens.count(ids[text]) for text in ("<tool_call>", "</tool_call>")] == [2, 2]
    inner = matcher.copy()
    for token in tokens:  # every one is in its mask, and taken
        assert token in legal(inner), words.dbg_tokens([token])
        inner.advance([token])
    inner.advance([end])
    assert inner.finished
    # After the marker only what the tokenizer writes next may come, however the marker is spelled.
    # A call that must come begins with the token itself.
    spelled = [words.tokenize_str(letter)[0] for letter in "<tool_call>"]
    for beginning in [[ids["<tool_call>"]]] + [spelled] * (choice == "auto"):
        started = matcher.copy()
        started.advance(beginning)
        assert legal(started) == words.tokenize_str("\n")


def test_arguments_have_white_space_as_other_json():
    tight, wide = '{"city":"Rome"}', '{"city": "Rome"}'
    at = {"type": "object", "properties": {"at": CITY}, "required": ["at"]}
    head, end = "<tool_call>go\n<arg_key>at</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"
    for whitespace in (True, False):
        one = matcher_of(tool("go", CITY), whitespace=whitespace)
        assert takes(one, call("go", tight)) and takes(one, call("go", wide)) == whitespace
        each = matcher_of(tool("go", at), form="glm45", whitespace=whitespace)
        assert takes(each, f"{head}{tight}{end}")
        assert takes(each, f"{head}{wide}{end}") == whitespace
