"""Structured output through LLM: it matches, equal to plain decoding, beside free requests."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.config.engine import EngineConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.generation import ErrorKind
from jaxspec.engine.structured import GrammarError, GrammarLimit

PATTERN = "[a-f]{3}(, [0-9]{2}){2,6}"
LIST = StructuredOutput(regex=PATTERN)
SCHEMA = StructuredOutput(
    json_schema={"type": "array", "items": {"enum": [1, 22, "x"]}, "maxItems": 5}, whitespace=False
)
CHOICE = StructuredOutput(choice=("yes", "no", "yes, but"))
FREE = SamplingParams(max_tokens=30)
SAMPLING = [
    FREE,
    SamplingParams(max_tokens=60, structured=LIST),
    SamplingParams(max_tokens=60, temperature=0.8, seed=2, structured=LIST),
    SamplingParams(max_tokens=60, temperature=1.0, seed=3, structured=SCHEMA),
    SamplingParams(max_tokens=60, structured=CHOICE, logit_bias={110: 5.0}, logprobs=1),
    SamplingParams(max_tokens=30, temperature=0.7, seed=4),
    SamplingParams(max_tokens=9, structured=LIST, stop_token_ids=(50,)),
]
PROMPTS = ["abc, 12, 12", "abc, 12, 12", "fed, 00", "[1,22,", "yes or no? ", "abc", "abc, 11"]


@pytest.fixture(scope="module")
def model(byte_model: Path) -> Path:
    return byte_model


@pytest.fixture(scope="module")
def llm(byte_llm: LLM) -> LLM:
    return byte_llm


@pytest.fixture(scope="module")
def expected(plain_byte_llm: LLM, llm: LLM) -> list[tuple[str, list[int], str]]:
    """Texts, tokens and finish reasons of plain decoding, one request after the other.

    Those of the free requests are from ``llm`` itself, when no structured one runs beside them.
    """
    free = [index for index, sampling in enumerate(SAMPLING) if sampling.structured is None]
    structured = [index for index in range(len(SAMPLING)) if index not in free]
    results = dict(zip(free, found(llm, free), strict=True))
    results |= dict(zip(structured, found(plain_byte_llm, structured), strict=True))
    return [results[index] for index in range(len(SAMPLING))]


def found(
    llm: LLM, chosen: Sequence[int] = range(len(SAMPLING))
) -> list[tuple[str, list[int], str]]:
    """Of some of the requests, by their indices."""
    prompts, sampling = [PROMPTS[i] for i in chosen], [SAMPLING[i] for i in chosen]
    completions = llm.generate(prompts, sampling)
    return [(one.text, one.token_ids, one.finish_reason) for one in completions]


def test_structured_texts_match_and_are_those_of_plain_decoding(llm: LLM, expected: Any):
    assert found(llm) == expected
    texts = [text for text, _, reason in expected if reason == "stop"]
    assert len(texts) >= 4
    for text in (expected[1][0], expected[2][0]):
        assert re.fullmatch(PATTERN, text)
    assert isinstance(json.loads(expected[3][0]), list)
    assert expected[4][0] in (CHOICE.choice or ())
    assert [reason for *_, reason in expected[:1] + expected[5:6]] == ["length"] * 2


@pytest.mark.slow
def test_structured_requests_survive_preemption(model: Any, expected: Any):
    few = LLM(
        model, "ngram", max_length=128, engine=EngineConfig(max_rows=8), page_size=8, num_pages=14
    )
    assert found(few) == expected
    assert sum(few.engine.scheduler.preemptions.values()) > 0


class Broken:
    """A matcher whose grammar gives up."""

    def __init__(self, matcher: Any, error: GrammarError):
        self.advance, self.error = matcher.advance, error

    def masks(self, *arguments: Any) -> np.ndarray:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GrammarLimit("it is too large"), ErrorKind.GRAMMAR_LIMIT),
        (GrammarError("it does not match"), ErrorKind.GRAMMAR_MISMATCH),
    ],
    ids=["limit", "mismatch"],
)
def test_an_error_of_a_grammar_ends_that_request_alone(
    llm: LLM, expected: Any, error: GrammarError, kind: ErrorKind
):
    engine = llm.engine
    others = llm.generate(PROMPTS[:3], SAMPLING[:3])
    generations = engine.add_all([one.prompt_token_ids for one in others], SAMPLING[:3])
    broken = generations[1]
    while len(broken.token_ids) < 3:
        engine.step(1)
    assert broken.grammar is not None
    matcher: Any = Broken(broken.grammar.matcher, error)
    broken.grammar.matcher = matcher
    engine.finish(generations)
    ended = broken.finish_reason, broken.error, broken.error_kind
    assert ended == ("error", str(error), kind)
    for index in (0, 2):
        assert generations[index].token_ids == expected[index][1]
        assert generations[index].error is None


def test_a_grammar_that_does_not_compile_is_refused(llm: LLM):
    with pytest.raises(ValueError, match=r"^regex: [^\n]*$"):
        llm.generate(["x", "y"], [FREE, SamplingParams(structured=StructuredOutput(regex="(a"))])
    assert llm.engine.is_idle
