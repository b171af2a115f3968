"""The status of a request that ended with an error follows from the error's kind."""

import dataclasses

import pytest

from jaxspec import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.decoding.state import ERRORS, Ending
from jaxspec.engine.generation import ErrorKind, Generation, RequestStatistics, Timings
from jaxspec.llm.completion import Completion
from jaxspec.serving.errors import ApiError
from jaxspec.serving.results import finish_reason

MESSAGE = "what it says decides nothing"
CLIENT = {ErrorKind.NO_TOKEN: "no_token_allowed", ErrorKind.GRAMMAR_LIMIT: "grammar_too_large"}


def failed(kind: ErrorKind) -> Completion:
    times = Timings(0.0, 0.0, 0.0, 0.0)
    return Completion("", [], [1], "error", MESSAGE, 0, 0, 0, 0.0, [], times, error_kind=kind)


def generation(sampling: SamplingParams) -> Generation:
    return Generation("0", (1,), sampling, RequestStatistics(0, 0, [0]))


@pytest.mark.parametrize("kind", ErrorKind)
def test_each_kind_has_a_status(kind: ErrorKind):
    with pytest.raises(ApiError) as caught:
        finish_reason(failed(kind))
    error = caught.value
    is_hidden = kind is ErrorKind.INTERRUPTED  # what went wrong inside stands in the log
    assert (error.message == MESSAGE) != is_hidden
    if kind in CLIENT:
        expected = (400, "invalid_request_error", CLIENT[kind])
    else:
        expected = (500, "server_error", None)
    assert (error.status, error.kind, error.code) == expected


@pytest.mark.parametrize("ending", ERRORS, ids=lambda ending: ending.name)
def test_each_error_of_a_row_has_a_kind_and_a_message(ending: Ending):
    own = generation(SamplingParams())
    assert own.row_ended(ending.name) == "error"
    assert own.error and own.error_kind is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (5,)},
        {"bad_token_ids": (5,)},
        {"logit_bias": {5: -100.0}},
        {"min_tokens": 2},
        {"structured": StructuredOutput(regex="a")},
    ],
    ids=str,
)
def test_a_request_that_restricts_its_tokens_may_have_left_none(fields: dict[str, object]):
    free = generation(SamplingParams())
    free.row_ended(Ending.NOT_FINITE.name)
    own = generation(dataclasses.replace(SamplingParams(), **fields))
    own.row_ended(Ending.NOT_FINITE.name)
    assert (free.error_kind, own.error_kind) == (ErrorKind.NOT_FINITE, ErrorKind.NO_TOKEN)


def test_a_row_that_ends_well_has_no_error():
    own = generation(SamplingParams())
    assert own.row_ended(Ending.STOP.name) == "stop"
    assert (own.error, own.error_kind) == (None, None)
