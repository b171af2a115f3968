"""The options of calls: the public functions and RoundOptions have the same ones."""

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec import functional
from jaxspec.config.speculation import PLAIN, SpeculationConfig
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.engine.programs.arguments import program_options
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey, Sizes
from tests.helpers.random_models import make_params

CHAIN = SpeculationConfig.chain(2)
FIELDS = {field.name: field for field in dataclasses.fields(RoundOptions)}
SIZES = Sizes(
    num_rows=2,
    shards=1,
    max_length=32,
    page_size=4,
    num_pages=20,
    max_stops=1,
    scratch_slots=2,
    max_chunk=16,
    max_rounds=8,
    fixed_rounds=4,
    fixed=True,
    trees=True,
)


@pytest.mark.parametrize(
    "function",
    [
        functional.decode,
        functional.prefill,
        functional.prefill_all,
        functional.draft,
        functional.verify_drafts,
    ],
)
def test_keywords_of_public_functions_are_options(function: Callable[..., Any]):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    # The shape becomes a speculation, masks are an array, and two have a default of their own: as
    # many rounds as are asked for, and none.
    named = {"shape", "masks", "max_rounds", "width"}
    keywords = {name: default for name, default in keywords.items() if name not in named}
    assert keywords
    assert keywords == {name: FIELDS[name].default for name in keywords}


def test_options_of_other_processes_are_equal():
    options = make_params("ngram", CHAIN).round_options(PLAIN)
    told = pickle.loads(pickle.dumps(options))
    assert told is not options
    assert told == options
    assert hash(told) == hash(options)
    assert dataclasses.replace(options, greedy=True) != options


def test_options_of_programs_are_those_of_their_sizes():
    params = make_params("ngram", CHAIN)
    read = program_options(params, SIZES, ReadKey(1, 5, 16, Kind.PROMPT))
    assert (read.width, read.columns, read.speculation) == (16, 5, params.speculation)
    assert read.prompt_logprobs and read.order_invariant and read.controls
    assert not (read.greedy or read.trees)
    some = program_options(params, SIZES, RoundsKey(1, 5, PLAIN, Kind.GREEDY))
    assert (some.max_rounds, some.fixed, some.columns) == (8, False, 5)
    assert some.greedy and some.trees and some.speculation.is_plain
    assert not (some.checked or some.logprobs or some.top_logprobs)
    four = program_options(params, SIZES, RoundsKey(1, 5, CHAIN.shape, Kind.FULL, rounds=4))
    assert (four.max_rounds, four.fixed, four.top_logprobs) == (4, True, 20)
    assert four.logprobs and four.controls and not four.greedy
