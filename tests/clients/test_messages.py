"""`/v1/messages` through Anthropic's client."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from jaxspec import LLM
from jaxspec.serving import results
from jaxspec.serving.parts import Part
from tests.helpers.events import CITY, SCRIPTS, scripted, stream_of, thought
from tests.helpers.served import MODEL, Served, run, with_http

pytestmark = pytest.mark.slow
KEY = "secret"
SAYS: Any = [{"role": "user", "content": "abc"}]
ASKED: Any = {"model": MODEL, "max_tokens": 150}
TOOL: Any = {"name": "weather", "input_schema": CITY}


class Answer(BaseModel):
    on: bool


@contextlib.asynccontextmanager
async def serving(llm: LLM, **options: Any) -> AsyncIterator[Any]:
    """The client of a server that listens, and asks for a key."""
    async with (
        Served(llm, api_keys=[KEY], **options) as server,
        server.address() as (host, port),
        anthropic.AsyncAnthropic(
            base_url=f"http://{host}:{port}", api_key=KEY, max_retries=0
        ) as client,
    ):
        yield client


def test_a_tool_is_called_and_answered(llm: LLM):
    async def test() -> None:
        async with serving(llm) as client:
            asked = {**ASKED, "tools": [TOOL]}
            once = {"type": "any", "disable_parallel_tool_use": True}
            first = await client.messages.create(messages=SAYS, tool_choice=once, **asked)
            [use] = first.content
            assert first.stop_reason == "tool_use" and use.type == "tool_use"
            assert use.input["city"] in ("Rome", "Oslo")
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
            messages = [
                *SAYS,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            second = await client.messages.create(
                messages=messages, tool_choice={"type": "none"}, **{**asked, "max_tokens": 5}
            )
            assert second.content[0].type == "text" and second.stop_reason == "max_tokens"

    run(test())


def test_streams_are_put_together(llm: LLM):
    async def test() -> None:
        async with serving(llm) as client:
            once = {"type": "tool", "name": "weather"}
            asked = {**ASKED, "messages": SAYS, "tools": [TOOL]}
            async with client.messages.stream(tool_choice=once, **asked) as stream:
                called = await stream.get_final_message()
            assert called.content[0].input["city"] in ("Rome", "Oslo")
            assert called.stop_reason == "tool_use" and called.usage.output_tokens > 10
            async with client.messages.stream(messages=SAYS, **{**ASKED, "max_tokens": 9}) as said:
                text = "".join([piece async for piece in said.text_stream])
                whole = await said.get_final_message()
            assert text == whole.content[0].text and text
            count = await client.messages.count_tokens(model=MODEL, messages=SAYS)
            usage = whole.usage
            assert usage.cache_read_input_tokens is not None
            assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

    run(test())


def test_the_client_runs_tools(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """It would keep the conversation at the server, and does without when it is told so."""
    monkeypatch.setattr(results, "finish_reason", lambda _: "stop")
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        asked.append(city)
        scripted(monkeypatch, Part("sunny"))
        return "sunny"

    scripted(monkeypatch, thought("hm"), Part(call=0, name="weather"), Part('{"city": "Oslo"}', 0))

    async def test() -> Any:
        async with serving(llm) as client:
            runner = client.beta.messages.tool_runner(tools=[weather], messages=SAYS, **ASKED)
            return await runner.until_done()

    last = run(test())
    assert asked == ["Oslo"] and last.content[0].text == "sunny"


def test_text_matches_a_schema(llm: LLM):
    async def test() -> Any:
        async with serving(llm) as client:
            return await client.messages.parse(messages=SAYS, output_format=Answer, **ASKED)

    assert isinstance(run(test()).parsed_output, Answer)


def test_errors_are_the_clients(llm: LLM):
    async def test() -> None:
        async with serving(llm) as client:
            image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
            wrong: Any = [{"role": "user", "content": [image]}]
            with pytest.raises(anthropic.BadRequestError, match="'image'") as caught:
                await client.messages.create(messages=wrong, **ASKED)
            body: Any = caught.value.body
            assert caught.value.request_id == body["request_id"]
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="other").messages.create(messages=SAYS, **ASKED)
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(messages=SAYS, **{**ASKED, "model": "other"})

    run(test())


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_answer_is_as_anthropic_types_it(
    llm: LLM, script: str, monkeypatch: pytest.MonkeyPatch
):
    scripted(monkeypatch, *SCRIPTS[script][0])
    body = {**ASKED, "messages": SAYS, "max_tokens": 4}
    events = with_http(llm, lambda http: stream_of(http, "/v1/messages", body))
    for event in events:
        TypeAdapter(RawMessageStreamEvent).validate_python(event)

    async def whole(http: Any) -> Any:
        return (await http.post("/v1/messages", json=body)).json()

    Message.model_validate(with_http(llm, whole))
