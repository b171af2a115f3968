"""Schemas of real life as tools and as formats of answers: what is written parses and validates."""

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any

import httpx
import jsonschema.validators
import pytest
from tokenizers import AddedToken, Tokenizer

from jaxspec import BUILT_IN_MODEL, LLM
from jaxspec.config.engine import EngineConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.engine.structured.json_schema import read_schema
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.sampling import SamplingFields
from jaxspec.serving.structured import structured_output
from jaxspec.serving.tool_formats.table import FORMATS
from jaxspec.serving.tool_grammar import ToolGrammar
from jaxspec.serving.tools import offered_tools
from tests.helpers.engines import CHAIN
from tests.helpers.marks import slow
from tests.helpers.real_schemas import REAL, Schema
from tests.helpers.served import MODEL, with_client, with_http
from tests.helpers.small_tokenizers import one_token_a_byte
from tests.helpers.tool_calls import parts_of, text_and_calls, walk

END = 256
# Keywords that cannot be enforced.
LOOSE = {
    *("pydantic: set", "pydantic: decimal", "zod: intersection"),
    *("tool: query", "tool: meeting", "tool: filter"),
}


def tool(schema: Schema) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def answer_format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def enforced(name: str) -> Mapping[str, Any]:
    """What an answer must be valid against: all of the schema but what cannot be enforced."""
    schema = REAL[name]
    says_null = "nullable" in json.dumps(schema)  # OpenAPI's, which jsonschema does not know
    return read_schema(schema).schema if name in LOOSE or says_null else schema


def check(name: str, text: str) -> None:
    schema, newest = enforced(name), jsonschema.Draft202012Validator
    jsonschema.validators.validator_for(schema, default=newest)(schema).validate(json.loads(text))


@functools.cache
def tokenizer() -> Tokenizer:
    own = one_token_a_byte()
    own.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return own


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer().to_str(), END + 1, [END])


def grammar_of(schema: Schema, form: str) -> ToolGrammar:
    body = {"messages": [{"role": "user"}], "tools": [tool(schema)], "tool_choice": "required"}
    request = ChatRequest.model_validate({**body, "parallel_tool_calls": False})
    return ToolGrammar(request, offered_tools(request), FORMATS[form])


def walked(output: StructuredOutput, phrase: str = "") -> str:
    """A text at random that the output allows."""
    matcher = compiler().matcher(output)
    texts = (walk(matcher, tokenizer(), END, seed, phrase) for seed in range(40))
    return next(text for text in texts if text is not None)


def test_there_are_46():
    assert len(REAL) == 46 and {name for name in REAL if read_schema(REAL[name]).problems} == LOOSE


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", slow("pythonic")])
@pytest.mark.parametrize("name", REAL)
def test_calls_match_the_schema(name: str, form: str):
    grammar = grammar_of(REAL[name], form)
    output = grammar.compiled(compiler())
    assert grammar.known(compiler()) == output, "nothing is left out but what is known"
    arguments = FORMATS[form].arguments
    phrase = arguments.after if arguments else ""
    text, syntax = walked(output, phrase).lstrip("\n"), grammar.syntax()
    said, [(called, arguments)] = text_and_calls(parts_of(syntax, [text]))
    assert (said, called) == ("", "f")
    assert text_and_calls(parts_of(syntax, [*text])) == (said, [(called, arguments)])
    check(name, arguments)


@pytest.mark.parametrize("name", REAL)
def test_answers_match_the_schema(name: str):
    fields = SamplingFields.model_validate({"response_format": answer_format(REAL[name])})
    output = structured_output(fields)
    assert output is not None
    check(name, walked(output))


@pytest.mark.slow
def test_the_served_answers_match_the_schemas():
    """Whole and streamed, at temperature 0: each answer that is finished is valid."""
    config, options = EngineConfig(max_rows=16), {"dtype": "float32", "max_length": 512}
    llm = LLM(BUILT_IN_MODEL, "ngram", speculation=CHAIN, engine=config, **options)
    found = with_client(llm, functools.partial(_served, names=list(REAL)))
    finished = [name for name, reason in found if reason in ("stop", "tool_calls")]
    assert len(found) == 2 * len(REAL) and len(finished) > len(REAL)


async def _served(client: Any, names: list[str]) -> list[tuple[str, str]]:
    few = asyncio.Semaphore(16)

    async def ask(name: str, **fields: Any) -> tuple[str, str]:
        body = {"model": MODEL, "temperature": 0, "max_completion_tokens": 300, **fields}
        message = [{"role": "user", "content": "config = "}]
        async with few:
            whole = await client.chat.completions.create(messages=message, **body)
            stream = await client.chat.completions.create(messages=message, stream=True, **body)
            deltas = [each.choices[0].delta async for each in stream if each.choices]
        [choice] = whole.choices
        calls = [call.function for call in choice.message.tool_calls or []]
        text = calls[0].arguments if calls else choice.message.content
        parts = [call.function.arguments for delta in deltas for call in delta.tool_calls or []]
        assert "".join(parts if calls else [delta.content or "" for delta in deltas]) == text
        if choice.finish_reason != "length":
            check(name, text)
        return name, choice.finish_reason

    called = {"tool_choice": "required", "parallel_tool_calls": False}
    asked = [ask(name, tools=[tool(REAL[name])], **called) for name in names]
    asked += [ask(name, response_format=answer_format(REAL[name])) for name in names]
    return await asyncio.gather(*asked)


@pytest.mark.parametrize("whitespace", [True, False])
def test_white_space_of_json_is_as_the_server_says(llm: LLM, whitespace: bool):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    spaces = {"logit_bias": {str(ord(" ")): 100}, "temperature": 0, "max_tokens": 240}
    fields = {"prompt": "a", "response_format": {**form}, **spaces}

    async def test(http: httpx.AsyncClient) -> str:
        answer = await http.post("/v1/completions", json=fields)
        return answer.json()["choices"][0]["text"]

    text = with_http(llm, test, json_whitespace=whitespace)
    assert text.startswith('{"a":1') != whitespace
    assert json.loads(text) == {"a": 1}
