"""Structured texts of the built-in model: they match, and speculation does not change them."""

import dataclasses
import functools
import json
import random
import re
from typing import Any

import pytest

from jaxspec import (
    BUILT_IN_HEAD,
    BUILT_IN_MODEL,
    LLM,
    Completion,
    SamplingParams,
    SpeculationConfig,
)
from jaxspec.config.engine import EngineConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.models.from_config.model import load_model_config
from tests.helpers.engines import SAMPLED, seal
from tests.helpers.marks import slow
from tests.helpers.structured_outputs import compiler, conforms, random_schema, tokenizer

DRAFTERS: dict[str, tuple[Any, SpeculationConfig]] = {
    "none": ("none", SpeculationConfig.chain(1)),
    "ngram": ("ngram", SpeculationConfig.chain(4)),
    "eagle3": (BUILT_IN_HEAD, SpeculationConfig(num_nodes=16, max_depth=4, top_k=4)),
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ARITHMETIC = 'start: sum\nsum: NUM (" + " NUM)*\nNUM: /[1-9][0-9]?/'
OUTPUTS = [
    StructuredOutput(json_schema=PERSON),
    StructuredOutput(json_schema=PERSON, whitespace=False),
    StructuredOutput(json_object=True),
    StructuredOutput(regex=r"def [a-z_]+\(self\):\n    return [a-z]+\n"),
    StructuredOutput(grammar=ARITHMETIC),
    StructuredOutput(choice=("import os", "import sys", "from os import path")),
    None,  # a row without restrictions beside them
]
PROMPTS = [
    "import json\n\n# A person as JSON\nPERSON = ",
    "PERSON = ",
    "def load():\n    return ",
    "class Stack:\n    ",
    "total = 1 + 2 + 3\ntotal = ",
    "#!/usr/bin/env python\n",
    "class Stack:\n",
]


@functools.cache
def llm(name: str) -> LLM:
    drafter, speculation = DRAFTERS[name]
    options: Any = {"speculation": speculation, "dtype": "float32", "max_length": 512}
    own = LLM(BUILT_IN_MODEL, drafter, engine=EngineConfig(max_rows=10), **options)
    seal(own.engine, dataclasses.replace(SAMPLED, structured=OUTPUTS[0]))
    seal(own.engine)
    return own


@functools.cache
def generated(name: str, temperature: float) -> list[Completion]:
    sampling = [
        SamplingParams(temperature, seed=index, max_tokens=48, structured=output)
        for index, output in enumerate(OUTPUTS)
    ]
    return llm(name).generate(PROMPTS, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_speculation_does_not_change_a_structured_text(name: str, temperature: float):
    found, expected = generated(name, temperature), generated("none", temperature)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert max(one.acceptance_length for one in found) > 1, "some drafts must be accepted"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_kinds_are_obeyed(temperature: float):
    completions = generated("none", temperature)
    ended = [one.finish_reason == "stop" for one in completions]
    for completion, done, output in zip(completions, ended, OUTPUTS, strict=True):
        text = completion.text
        if not done or output is None:
            continue  # cut at its limit, or free
        match output.kind:
            case "json_schema" | "json_object":
                assert isinstance(json.loads(text), dict)
            case "regex":
                assert re.fullmatch(output.regex or "", text)
            case "grammar":
                assert re.fullmatch(r"[1-9][0-9]?( \+ [1-9][0-9]?)*", text)
            case _:
                assert text in (output.choice or ())
    assert ended[5] and sum(ended[:6]) >= 3
    # Of those that were cut, what there is matches so far: the matcher took every token.
    assert all(len(one.token_ids) == 48 for one in completions if one.finish_reason == "length")


@pytest.mark.parametrize(
    ("name", "count"), [slow("ngram", 10), slow("eagle3", 40), slow("ngram", 500)]
)
def test_the_outputs_of_random_schemas_parse_and_conform(name: str, count: int):
    rng = random.Random(0)
    schemas = [random_schema(rng, 2) for _ in range(count)]
    prompts = ["config = ", "data = json.loads('", "x = ", "# JSON:\n"]
    sampling = [
        SamplingParams(
            index % 3 * 0.6,
            seed=index,
            max_tokens=300,
            structured=StructuredOutput(json_schema=schema, whitespace=False),
        )
        for index, schema in enumerate(schemas)
    ]
    completions = llm(name).generate([prompts[i % 4] for i in range(count)], sampling)
    for schema, completion in zip(schemas, completions, strict=True):
        assert completion.finish_reason == "stop"
        assert conforms(json.loads(completion.text), schema), (schema, completion.text)


@pytest.mark.slow
def test_200_schemas_finish_at_temperature_0():
    """No text is white space, or digits, up to its limit."""
    rng = random.Random(1)
    schemas = [random_schema(rng, 2) for _ in range(200)]
    sampling = [
        SamplingParams(0.0, max_tokens=400, structured=StructuredOutput(json_schema=schema))
        for schema in schemas
    ]
    completions = llm("ngram").generate(["config = "] * len(schemas), sampling)
    assert [completion.finish_reason for completion in completions] == ["stop"] * len(schemas)
    for schema, completion in zip(schemas, completions, strict=True):
        assert conforms(json.loads(completion.text), schema), (schema, completion.text)


def test_the_check_of_schemas_can_fail():
    rng = random.Random(5)
    for _ in range(200):
        schema = random_schema(rng, 2)
        assert not conforms({"no": ["such", "thing"]}, schema)
        assert not conforms(object(), schema)


def test_the_words_of_a_mask_fit_the_model():
    assert compiler().vocab_size == load_model_config(BUILT_IN_MODEL).vocab_size == 4096
    assert tokenizer().eos_token_id in compiler().stop_token_ids
