"""What lines of a file of prompts may say."""

from typing import Any

import pytest

from jaxspec import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.llm.batch.requests import line_id, read_request

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=20, seed=7)


def sampling(index: int = 0, **fields: Any) -> SamplingParams:
    return read_request(index, {"prompt": "a", **fields}, DEFAULTS).sampling


def test_fields_have_the_names_of_sampling_params():
    found = sampling(id="x", max_tokens=3, stop=["\n"], logit_bias={"11": -2}, seed=None)
    assert found == SamplingParams(0.5, max_tokens=3, stop=("\n",), logit_bias={11: -2})
    schema = {"type": "object"}
    structured = sampling(structured={"json_schema": schema}).structured
    assert structured == StructuredOutput(json_schema=schema)


def test_prompts_are_text_messages_or_token_ids():
    messages = [{"role": "user", "content": "Hello!"}]
    assert read_request(0, {"prompt": "a"}, DEFAULTS).prompt == "a"
    assert read_request(0, {"prompt_token_ids": [1, 2]}, DEFAULTS).prompt == [1, 2]
    request = read_request(0, {"messages": messages}, DEFAULTS)
    assert (request.prompt, request.messages) == (None, messages)


def test_lines_have_seeds_of_their_own():
    assert [sampling(index).seed for index in range(3)] == [7, 8, 9]
    assert sampling(2, seed=5).seed == 5
    # The samples of one line have the seeds after its own: no two lines share one.
    seeds = [one.seed for index in range(3) for one in sampling(index, n=4).samples(0)]
    assert len(set(seeds)) == 12


def test_names():
    assert [line_id(line) for line in ({"id": 3}, {"custom_id": "x"}, {})] == [3, "x", None]
    for line, message in (({"id": 1, "custom_id": 2}, "not both"), ({"id": [1]}, "id must be")):
        with pytest.raises(ValueError, match=message):
            line_id(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "exactly one of prompt, messages, prompt_token_ids; this has none"),
        ({"prompt": "a", "messages": []}, "this has prompt and messages"),
        ({"prompt": ["a"]}, "prompt must be text"),
        ({"messages": "a"}, "messages must be a list of messages"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of token ids"),
        ({"prompt": "a", "max_token": 3}, "unknown field max_token: fields are those of Sampl"),
        ({"prompt": "a", "trees": True}, "unknown field trees"),
        ({"prompt": "a", "temperature": -1}, "temperature must be a finite number, at least 0"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be a finite number"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias must be an object whose names"),
        ({"prompt": "a", "structured": {"xml": 1}}, "structured must be an object with some of"),
        ({"prompt": "a", "structured": {}}, "needs exactly one of"),
    ],
)
def test_bad_lines_are_refused_by_name(line: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read_request(0, line, DEFAULTS)
