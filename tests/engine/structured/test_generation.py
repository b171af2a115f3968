"""Structured texts of the built-in model: they match, and speculation does not change them."""

import functools
import json
import random
import re
from typing import Any

import numpy as np
import pytest

from jaxspec import BUILT_IN_HEAD, BUILT_IN_MODEL, SpeculationConfig
from jaxspec.checkpoints.load import load
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Ending
from tests.helpers.marks import slow
from tests.helpers.structured_outputs import (
    compiler,
    conforms,
    generate_structured,
    random_schema,
    tokenizer,
)

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
def engine(name: str) -> Any:
    drafter, speculation = DRAFTERS[name]
    return load(BUILT_IN_MODEL, drafter, speculation=speculation, dtype="float32")


def generate(name: str, temperature: float, new_tokens: int = 48):
    sampling = make_sampling(len(PROMPTS), temperature=temperature, seeds=3)
    return generate_structured(engine(name), PROMPTS, OUTPUTS, sampling, new_tokens=new_tokens)


@functools.cache
def expected(temperature: float):
    return generate("none", temperature)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_speculation_does_not_change_a_structured_text(name: str, temperature: float):
    _, found, state = generate(name, temperature)
    assert found == expected(temperature)[1]
    assert np.asarray(state.rows.stats.accepted)[:, 1:].any(), "some drafts must be accepted"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_kinds_are_obeyed(temperature: float):
    texts, found, _ = expected(temperature)
    for text, output in zip(texts, OUTPUTS, strict=True):
        if text is None or output is None:
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
    assert texts[5] is not None and sum(text is not None for text in texts[:6]) >= 3
    # Of those that were cut, what there is matches so far: the matcher took every token.
    assert all(len(row) == 48 for row, text in zip(found, texts, strict=True) if text is None)


def check_random_schemas(name: str, count: int, rows: int) -> None:
    rng = random.Random(0)
    prompts = ["config = ", "data = json.loads('", "x = ", "# JSON:\n"]
    for first in range(0, count, rows):
        schemas = [random_schema(rng, 2) for _ in range(rows)]
        outputs = [StructuredOutput(json_schema=one, whitespace=False) for one in schemas]
        sampling = make_sampling(
            rows, temperature=np.arange(rows) % 3 * 0.6, seeds=np.arange(rows) + first
        )
        texts, _, state = generate_structured(
            engine(name), [prompts[i % 4] for i in range(rows)], outputs, sampling, new_tokens=300
        )
        assert (np.asarray(state.rows.ending) == Ending.STOP).all()
        for schema, text in zip(schemas, texts, strict=True):
            assert text is not None and conforms(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize(
    ("name", "count", "rows"),
    [slow("ngram", 10, 10), slow("eagle3", 40, 20), slow("ngram", 500, 50)],
)
def test_the_outputs_of_random_schemas_parse_and_conform(name: str, count: int, rows: int):
    check_random_schemas(name, count, rows)


def test_the_check_of_schemas_can_fail():
    rng = random.Random(5)
    for _ in range(200):
        schema = random_schema(rng, 2)
        assert not conforms({"no": ["such", "thing"]}, schema)
        assert not conforms(object(), schema)


def test_the_words_of_a_mask_fit_the_model():
    assert compiler().vocab_size == engine("none").target.config.vocab_size == 4096
    assert tokenizer().eos_token_id in compiler().stop_token_ids
