"""OpenAI's client for Python: chats, completions and responses."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.helpers.clients import ABROAD, CALL, CALLS, SUNNY, TOOL, Place
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Script, thought

pytestmark = pytest.mark.slow
SAYS: Any = [{"role": "user", "content": "abc"}]
CHAT: Any = {"model": MODEL, "messages": SAYS, "max_tokens": 24}


@pytest.fixture
def client(listener: Listening) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=listener.url, api_key=KEY, max_retries=0) as found:
        yield found


@pytest.mark.usefixtures("server")
def test_a_stream_is_the_whole_answer(client: openai.OpenAI):
    whole = client.chat.completions.create(**CHAT).choices[0]
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content and text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"
    assert len(chunks) > 5
    asked: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole.text and len(pieces) > 5
    asked = {"model": MODEL, "input": "abc", "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text and len(pieces) > 5
    assert whole.status == "incomplete" and events[-1].type == "response.incomplete"


@pytest.mark.usefixtures("brief")
def test_characters_of_several_tokens_come_whole(client: openai.OpenAI):
    """A token is a byte here. The model truly writes this text, which is the only legal one."""
    only: Any = {"structured_outputs": {"choice": [ABROAD]}}
    asked = {**CHAT, "max_tokens": 90, "extra_body": only}
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        last = stream.get_final_completion().choices[0]
    assert "".join(pieces) == last.message.content == ABROAD and last.finish_reason == "stop"
    assert len(pieces) > 10 and not any("\ufffd" in piece for piece in pieces)
    asked = {"model": MODEL, "prompt": "abc", "max_tokens": 90, "extra_body": only}
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == ABROAD and len(pieces) > 10


@pytest.mark.usefixtures("brief")
def test_structured_output_is_parsed(client: openai.OpenAI):
    asked = {**CHAT, "max_tokens": 200}
    parsed = client.chat.completions.parse(response_format=Place, **asked).choices[0].message.parsed
    assert isinstance(parsed, Place)
    with client.chat.completions.stream(response_format=Place, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    response = client.responses.parse(model=MODEL, input="abc", text_format=Place)
    assert isinstance(response.output_parsed, Place)
    with client.responses.stream(model=MODEL, input="abc", text_format=Place) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == response.output_parsed


@pytest.mark.usefixtures("brief")
def test_a_text_that_is_cut_is_an_error_of_parsing(client: openai.OpenAI):
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(response_format=Place, **{**CHAT, "max_tokens": 8})
    assert caught.value.completion.usage is not None
    assert caught.value.completion.usage.completion_tokens == 8


@pytest.mark.usefixtures("brief")
def test_a_forced_call_is_the_models(client: openai.OpenAI):
    """No script: the grammar of the tool has the model write a call."""
    choices: tuple[Any, ...] = (
        "required",
        {"type": "function", "function": {"name": "weather"}},
    )
    for choice in choices:
        asked = {**CHAT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**{**asked, "max_tokens": 200}).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
        arguments: Any = whole.message.tool_calls[0]
        assert json.loads(arguments.function.arguments)["city"] in ("Zürich", "東京")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_answer_read(
    client: openai.OpenAI, says: Callable[..., Script], streams: bool
):
    script = says(CALLS, thought("so") + SUNNY)
    asked = {**CHAT, "tools": [TOOL]}

    def answer(messages: Any) -> Any:
        if not streams:
            return client.chat.completions.create(**asked | {"messages": messages}).choices[0]
        with client.chat.completions.stream(**asked | {"messages": messages}) as stream:
            stream.until_done()
            return stream.get_final_completion().choices[0]

    first = answer(SAYS)
    [use] = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and first.message.content.strip() == "Moment …"
    assert json.loads(use.function.arguments) == {"city": "Zürich"}
    assert first.message.model_dump()["reasoning"] == "schön"
    result = {"role": "tool", "tool_call_id": use.id, "content": "12 °C"}
    last = answer([*SAYS, first.message.model_dump(exclude_none=True), result])
    assert last.message.content == SUNNY and last.finish_reason == "stop"
    assert "schön\n</think>" in script.prompts[1] and CALL in script.prompts[1]
    assert "<tool>12 °C</tool>" in script.prompts[1]


@pytest.mark.usefixtures("server")
def test_errors_are_the_clients(client: openai.OpenAI, listener: Listening):
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    wrong: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, "messages": wrong})
    assert caught.value.param == "messages.0.content" and caught.value.request_id
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a" * 9000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**CHAT, "model": "other"})
    for ask in (client.embeddings.create, client.moderations.create):
        with pytest.raises(openai.NotFoundError):
            ask(model=MODEL, input="abc")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").chat.completions.create(**CHAT)
    assert [model.id for model in client.models.list()] == [MODEL]
