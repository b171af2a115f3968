"""instructor: models of pydantic, by tools and by JSON."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.helpers.clients import Place, client_package
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Script, called

instructor = client_package("instructor")
errors = client_package("instructor.core")
pytestmark = pytest.mark.slow
MODES = ("TOOLS", "JSON_SCHEMA")
GOOD = called("Place", '{"city": "東京", "known": true}')
WRONG = called("Place", '{"city": "Oslo", "known": true}')
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 300}


def client(listener: Listening, mode: str = "TOOLS", api_key: str = KEY) -> Any:
    inner = openai.OpenAI(base_url=listener.url, api_key=api_key, max_retries=0)
    return instructor.from_openai(inner, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_of_the_class(brief: Listening, mode: str):
    found = client(brief, mode).chat.completions.create(**ASKED, response_model=Place)
    assert isinstance(found, Place)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_grows_to_the_answer(brief: Listening, mode: str):
    parts = list(client(brief, mode).chat.completions.create_partial(**ASKED, response_model=Place))
    last = Place.model_validate(parts[-1].model_dump())
    whole = client(brief, mode).chat.completions.create(**ASKED, response_model=Place)
    assert last.model_dump() == whole.model_dump()
    assert len(parts) > 2


def test_a_wrong_answer_is_asked_for_again(brief: Listening, says: Callable[..., Script]):
    """The call and what is wrong with it go back as the history."""
    script = says(WRONG, GOOD)
    found = client(brief).chat.completions.create(**ASKED, response_model=Place, max_retries=2)
    assert found.city == "東京" and WRONG in script.prompts[1]


def test_errors_are_the_clients(brief: Listening):
    asked: Any = {**ASKED, "response_model": Place, "max_retries": 0}
    refused = errors.InstructorRetryException, openai.AuthenticationError
    with pytest.raises(refused, match="401"):
        client(brief, api_key="other").chat.completions.create(**asked)
    with pytest.raises(errors.IncompleteOutputException):
        client(brief).chat.completions.create(**{**asked, "max_tokens": 5})
