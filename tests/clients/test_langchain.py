"""langchain-openai: chats, and responses."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.helpers.clients import ABROAD, CALL, CALLS, SUNNY, TOOL, Place, client_package
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Script

ChatOpenAI = client_package("langchain_openai").ChatOpenAI
messages = client_package("langchain_core.messages")
pytestmark = pytest.mark.slow
RESPONSES = pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])


def chat(listener: Listening, **options: Any) -> Any:
    given = {"max_tokens": 200, "max_retries": 0, "api_key": KEY, "model": MODEL, **options}
    return ChatOpenAI(base_url=listener.url, **given)


def text_of(message: Any) -> str:
    return message.text if isinstance(message.text, str) else message.text()


@RESPONSES
def test_a_stream_is_the_whole_answer(server: Listening, responses: bool):
    model = chat(server, max_tokens=24, use_responses_api=responses)
    whole = text_of(model.invoke("abc"))
    pieces = [text_of(chunk) for chunk in model.stream("abc")]
    assert "".join(pieces) == whole and len(pieces) > 5


@RESPONSES
def test_structured_output(brief: Listening, responses: bool):
    model = chat(brief, use_responses_api=responses)
    assert isinstance(model.with_structured_output(Place).invoke("abc"), Place)


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_methods_of_structured_output(brief: Listening, method: str):
    """The JSON of json_mode may be of any shape, so its fields are not those of the class."""
    model = chat(brief).with_structured_output(Place, method=method, include_raw=True)
    found = model.invoke("abc json")
    assert found["raw"].response_metadata["finish_reason"] in ("stop", "tool_calls")
    assert isinstance(found["parsed"], Place) or method == "json_mode"


def test_characters_of_several_tokens_come_whole(brief: Listening):
    model = chat(brief, extra_body={"structured_outputs": {"choice": [ABROAD]}})
    pieces = [text_of(chunk) for chunk in model.stream("abc")]
    assert "".join(pieces) == ABROAD and len(pieces) > 10


@RESPONSES
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_answer_read(
    listener: Listening, says: Callable[..., Script], streams: bool, responses: bool
):
    script = says(CALLS, SUNNY)
    model = chat(listener, use_responses_api=responses).bind_tools([TOOL])

    def answer(given: list[Any]) -> Any:
        if not streams:
            return model.invoke(given)
        first, *others = model.stream(given)
        for other in others:
            first += other
        return first

    said: list[Any] = [messages.HumanMessage("abc")]
    first = answer(said)
    [use] = first.tool_calls
    assert use["args"] == {"city": "Zürich"} and use["name"] == "weather"
    last = answer([*said, first, messages.ToolMessage("12 °C", tool_call_id=use["id"])])
    assert text_of(last) == SUNNY
    assert CALL in script.prompts[1] and "<tool>12 °C</tool>" in script.prompts[1]


def test_errors_are_the_clients(server: Listening):
    with pytest.raises(openai.AuthenticationError):
        chat(server, api_key="other").invoke("abc")
    with pytest.raises(openai.NotFoundError):
        chat(server, model="other").invoke("abc")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(server, temperature=-1).invoke("abc")
