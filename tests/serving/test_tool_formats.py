"""Calls as each family of models writes them: the grammar takes them, and the parser reads what the
grammar writes."""

import ast
import functools
import itertools
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from jaxspec.engine.structured import GrammarCompiler, Matcher
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.tool_formats.syntax import CallSyntax
from jaxspec.serving.tool_formats.table import FORMATS, told_format
from jaxspec.serving.tool_grammar import ToolGrammar
from jaxspec.serving.tools import offered_tools
from tests.helpers.small_tokenizers import one_token_a_byte
from tests.helpers.tool_calls import Call, cut, parts_of, text_and_calls, walk, written

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
A = '{"city": "Oslo", "days": 3}'
# As the models' templates write them; text, calls.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "hermes": (f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>',),
    "llama3_json": (f'{{"name": "weather", "parameters": {A}}}',),
    "mistral": (
        f"[TOOL_CALLS]weather[ARGS]{A}",
        f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]now[ARGS]{{}}",
    ),
    "mistral_v3": (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}}}]',
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "pythonic": ('[weather(city="Oslo", days=3)]', '[weather(city="Oslo", days=3), now()]'),
    "lfm2": ('<|tool_call_start|>[weather(city="Oslo", days=3)]<|tool_call_end|>',),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "seed": (
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    ),
    "hy3": (
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>Oslo</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
    ),
    "granite": (
        f'<|tool_call|>[{{"name": "weather", "arguments": {A}}}]',
        f'<|tool_call|>[{{"name": "weather", "arguments": {A}}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    "glm47": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
    ),
    "olmo3": (
        '<function_calls>\nweather(city="Oslo", days=3)\n</function_calls>',
        '<function_calls>\nweather(city="Oslo", days=3)\nnow()\n</function_calls>',
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{A}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{A}<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{A}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{A}",
    ),
}  # fmt: skip
SPECIAL = [
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<seed:tool_call>",
        "<|tool_call|>",
        "<|start|>",
        "<|end|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
    ),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        f"<｜tool▁{word}｜>"
        for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    ),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
]
END = "<|im_end|>"
VALUE = {
    "type": "object",
    "properties": {"k": {"$ref": "#/$defs/V"}},
    "additionalProperties": False,
}
EVERY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "choice": {"enum": ["a b", "a", "<b>"]},
        "number": {"type": "number"},
        "on": {"type": "boolean"},
        "off": {"type": ["boolean", "null"]},
        "tree": {"$ref": "#/$defs/V"},
        "list": {"type": "array", "items": {"type": "string"}},
        "short": {"type": "string", "maxLength": 9},
    },
    "required": ["choice", "on"],
    "additionalProperties": False,
    "$defs": {"V": VALUE},
}
TOOLS = [
    {"function": {"name": "weather", "parameters": WEATHER}},
    {"function": {"name": "now"}},
    {"function": {"name": "every.thing-1", "parameters": EVERY}},
]


@functools.cache
def tokenizer(special: bool) -> Tokenizer:
    found = one_token_a_byte()
    found.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    for text in SPECIAL:
        token = AddedToken(text, special=special, normalized=False)
        (found.add_special_tokens if special else found.add_tokens)([token])
    return found


@functools.cache
def compiler(special: bool) -> GrammarCompiler:
    own = tokenizer(special)
    return GrammarCompiler(own.to_str(), own.get_vocab_size(), [own.get_vocab()[END]])


def grammar_of(form: str, **fields: Any) -> ToolGrammar:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    request = ChatRequest.model_validate(body)
    return ToolGrammar(request, offered_tools(request), FORMATS[form])


@functools.cache
def syntax_of(form: str) -> CallSyntax:
    return grammar_of(form).syntax()


@functools.cache
def matcher_of(form: str, choice: str, special: bool, several: bool = True) -> Matcher:
    grammar = grammar_of(form, tool_choice=choice, parallel_tool_calls=several)
    own = compiler(special)
    return own.matcher(grammar.compiled(own))


def takes(
    form: str, text: str, choice: str = "auto", *, special: bool, several: bool = True
) -> bool:
    matcher = matcher_of(form, choice, special, several).copy()
    for token in tokenizer(special).encode(text).ids:
        if not matcher.mask()[token // 32] >> np.uint32(token % 32) & 1:
            return False
        matcher.advance([token])
    return matcher.complete


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_written_as_the_models_write_them(form: str, special: bool):
    own = FORMATS[form]
    for text in PUBLISHED[form]:
        several = "now" in text
        for choice in ("auto", "required"):
            assert takes(form, text, choice, special=special)
            assert takes(form, text, choice, special=special, several=False) == (not several)
        assert takes(form, f"Let me see.\n{text}", special=special) == (not own.text)
        assert not takes(form, f"Let me see.\n{text}", "required", special=special)
        for wrong in (text.replace("weather", "news"), text.replace("city", "town")):
            assert not takes(form, wrong, "required", special=special)
        assert not takes(
            form, text.replace(": 3" if A in text else "3", ": x"), "required", special=special
        )
        calls = [("weather", json.loads(A)), ("now", {})][: 1 + several]
        assert written(syntax_of(form), calls) == text
        said, found = text_and_calls(parts_of(syntax_of(form), [text]))
        assert said == "" and [(name, json.loads(one)) for name, one in found] == calls
    free = f"{own.text}Hello <b>!"
    assert takes(form, free, special=special) and not takes(form, free, "required", special=special)
    assert text_and_calls(parts_of(syntax_of(form), [free])) == ("Hello <b>!", [])


TEXTS = st.text(st.sampled_from(list('ab\n<>/"\\{}[]=, ()é😀:_|null')), max_size=12)
JSON_VALUES = st.recursive(
    st.just({}), lambda inner: st.fixed_dictionaries({"k": inner}), max_leaves=3
)
ARGUMENTS = st.fixed_dictionaries(
    {"choice": st.sampled_from(["a b", "a", "<b>"]), "on": st.booleans()},
    optional={
        "text": TEXTS,
        "maybe": st.none() | TEXTS.filter(lambda text: text != "null"),
        "number": st.integers(-99, 99) | st.sampled_from([1.5, -2.25, 1e-7]),
        "off": st.none() | st.booleans(),
        "tree": JSON_VALUES,
        "list": st.lists(TEXTS, max_size=3),
        "short": TEXTS.map(lambda text: text[:9]),
    },
)
CALLS = st.lists(
    st.tuples(st.just("every.thing-1"), ARGUMENTS)
    | st.tuples(st.just("now"), st.just({}))
    | st.tuples(st.just("weather"), st.fixed_dictionaries({"city": TEXTS})),
    min_size=1,
    max_size=3,
)


def ordered(calls: list[Call]) -> list[Call]:
    """Arguments in the order of the schema."""
    order = [*EVERY["properties"], "city"]
    return [(name, {key: given[key] for key in order if key in given}) for name, given in calls]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=10, deadline=None)
@given(
    calls=CALLS,
    before=TEXTS,
    places=st.lists(st.integers(0, 999), max_size=9),
    special=st.booleans(),
)
def test_what_is_written_is_read(
    form: str, calls: list[Call], before: str, places: list[int], special: bool
):
    own, syntax = FORMATS[form], syntax_of(form)
    calls = ordered(calls)[: 1 if own.single else None]
    before = before if own.trigger else ""
    text = before + written(syntax, calls)
    assert takes(form, text, special=special)
    said, found = text_and_calls(parts_of(syntax, cut(text, places)))
    assert said == before.rstrip("\n")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=30, deadline=None)
@given(
    places=st.lists(st.integers(0, 999), max_size=9),
    end=st.integers(0, 999),
    which=st.integers(0, 1),
)
def test_a_text_that_ends_anywhere_is_the_same_in_any_pieces(
    form: str, places: list[int], end: int, which: int
):
    text = PUBLISHED[form][which % len(PUBLISHED[form])]
    text = text[: end % (len(text) + 1)]
    whole = text_and_calls(parts_of(syntax_of(form), [text]))
    assert text_and_calls(parts_of(syntax_of(form), cut(text, places))) == whole
    said, calls = whole
    if not calls:
        assert said == text.removeprefix(FORMATS[form].text) or said == text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_what_the_grammar_allows_is_read(form: str, special: bool):
    schemas = {"weather": WEATHER, "now": {"maxProperties": 0}, "every.thing-1": EVERY}
    matcher, own = matcher_of(form, "required", special), tokenizer(special)
    texts = (walk(matcher, own, own.get_vocab()[END], seed) for seed in range(20))
    found = list(itertools.islice((text for text in texts if text is not None), 2))
    assert len(found) == 2
    for text in found:
        said, calls = text_and_calls(parts_of(syntax_of(form), [text.lstrip("\n")]))
        assert said == "" and calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\n{\"name\": ...", "hermes"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral_v3"),
        ("[func_name1(params_name1=params_value1), func_name2(params)] \"parameters\"", "pythonic"),
        ("<|tool_call_start|>[", "lfm2"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>", "glm45"),
        ("<tool_call>{function-name}<arg_key>", "glm47"),
        ("wrapped in <function_calls></function_calls> XML tags", "olmo3"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
        ("'<｜tool▁calls▁begin｜>' ... '\\n' + '```json' + '\\n'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name", "deepseek_v31"),
        ("{% set dsml = '｜DSML｜' %}", "deepseek_v32"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("' to=functions.' ... '<|constrain|>json<|message|>'", "harmony"),
        ("' to=functions.' + name", "harmony"),
        ("<seed:tool_call>\n<function=", "seed"),
        ("<|tool_call|> ... <tool_response>", "granite"),
        ("{{ messages }}", "hermes"),
    ],
)  # fmt: skip
def test_the_format_is_told_from_the_template(template: str, form: str):
    assert told_format(template) == form


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (
            "harmony",
            (
                f" to=functions.weather<|channel|>commentary json<|message|>{A}",
                f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{A}",
                f"<|channel|>commentary to=functions.weather json<|message|>{A}",
            ),
        ),
        (
            "mistral_v3",
            (
                f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}, "id": "a1B2c3D4e"}}]',
                f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}}}]',
            ),
        ),
        ("mistral", (f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{A}",)),
        ("pythonic", ("[weather(city='Oslo', days=3)]",)),
        ("lfm2", ("<|tool_call_start|>[weather(city='Oslo', days=3)]<|tool_call_end|>",)),
        ("hermes", (f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>\n',)),
    ],
)
def test_other_spellings_of_a_call_are_taken_and_read(form: str, texts: tuple[str, ...]):
    for text, special in itertools.product(texts, (False, True)):
        for choice in ("auto", "required"):
            assert takes(form, text, choice, special=special)
            assert not takes(form, text.replace("weather", "news"), "required", special=special)
        for places in ([], range(len(text))):
            said, found = text_and_calls(parts_of(syntax_of(form), cut(text, [*places])))
            assert said == "" and [(name, json.loads(one)) for name, one in found] == [
                ("weather", json.loads(A))
            ]


@pytest.mark.parametrize("special", [False, True])
def test_gpt_oss_may_say_something_before_a_call(special: bool):
    [call] = PUBLISHED["harmony"]
    text = f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{call}"
    assert takes("harmony", text, special=special)
    assert not takes("harmony", text, "required", special=special)
    assert not takes("harmony", text.replace("weather", "news"), special=special)


def test_a_text_in_single_quotes_is_read_as_python_has_it():
    for quoted in (r"'it\'s'", r"""'a "b"'""", r"'a\\b'", r"'é\n\t'", "''"):
        call = f"[weather(city={quoted})]"
        [(_, found)] = text_and_calls(parts_of(syntax_of("pythonic"), [*call]))[1]
        assert json.loads(found) == {"city": ast.literal_eval(quoted)}
        assert takes("pythonic", call, "required", special=False)


def test_ids_are_as_the_formats_need_them():
    def ids(form: str, text: str, first: int = 0) -> list[str | None]:
        syntax = CallSyntax(FORMATS[form], {"now": {}}, first)
        return [part.id for part in parts_of(syntax, [text]) if part.name]

    written = "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}"
    assert ids("mistral", written) == ["a1B2c3D4e"]
    mistral = ids("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}")
    assert len(set(mistral)) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", i or "") for i in mistral)
    one = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    kimi = text.format("".join(one.format(number) for number in (3, 4, 4, 9)))
    assert ids("kimi_k2", kimi, first=3) == [f"functions.now:{n}" for n in (3, 4, 5, 9)]
    hermes = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert ids("hermes", hermes) == [None], "any will do"
