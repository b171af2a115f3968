"""`/v1/responses` through its clients: openai, and openai-agents in its default."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from jaxspec import LLM
from jaxspec.serving import results
from jaxspec.serving.parts import Part
from tests.helpers.events import call, scripted, thought
from tests.helpers.served import MODEL, Served, run

pytestmark = pytest.mark.slow
END = 256  # the token that ends a text
# The model would write on: its end is likeliest wherever it may be.
SHORT = {"temperature": 0, "logit_bias": {str(END): 100}}


class Answer(BaseModel):
    on: bool


@contextlib.asynccontextmanager
async def serving(llm: LLM, **options: Any) -> AsyncIterator[Any]:
    """OpenAI's client of a server that listens."""
    async with Served(llm, **options) as server, server.address() as (host, port):
        url = f"http://{host}:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


def tool(asked: list[str]) -> Any:
    @function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    return weather


def agent(client: Any, *tools: Any, **options: Any) -> Any:
    set_tracing_disabled(True)  # it would send what it does elsewhere
    settings = ModelSettings(tool_choice="required" if tools else None, extra_body=SHORT)
    model = OpenAIResponsesModel(model=MODEL, openai_client=client)
    options = {"instructions": "be brief", "model_settings": settings, **options}
    return Agent(name="a", model=model, tools=list(tools), **options)


@pytest.mark.parametrize("keeps", [False, True], ids=["whole input", "previous_response_id"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_agent_calls_a_tool_and_goes_on(llm: LLM, streams: bool, keeps: bool):
    async def test() -> tuple[Any, list[str]]:
        asked: list[str] = []
        async with serving(llm) as client:
            own = agent(client, tool(asked))
            options: Any = {"auto_previous_response_id": keeps}
            if not streams:
                return await Runner.run(own, "abc", **options), asked
            result = Runner.run_streamed(own, "abc", **options)
            kinds = [event.type async for event in result.stream_events()]
            assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
            return result, asked

    result, asked = run(test())
    assert len(asked) == 1 and result.final_output == ""
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.context_wrapper.usage.requests == 2
    assert result.context_wrapper.usage.input_tokens > 50


def test_an_agent_gets_what_matches_its_type(llm: LLM):
    async def test() -> Any:
        async with serving(llm) as client:
            return await Runner.run(agent(client, output_type=Answer), "abc")

    assert isinstance(run(test()).final_output, Answer)


def test_an_agent_is_told_of_a_text_that_was_cut(llm: LLM):
    async def test() -> None:
        async with serving(llm) as client:
            cut = ModelSettings(max_tokens=2, extra_body={"ignore_eos": True})
            with pytest.raises(ModelBehaviorError, match="incomplete"):
                await Runner.run(agent(client, model_settings=cut), "abc")

    run(test())


def test_reasoning_goes_through_an_agent(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(results, "finish_reason", lambda _: "stop")
    scripted(monkeypatch, thought("let me "), thought("see"), Part("sunny"))

    async def test() -> Any:
        async with serving(llm) as client:
            result = Runner.run_streamed(agent(client), "abc")
            return result, [event async for event in result.stream_events()]

    result, _ = run(test())
    [reasoning, message] = result.new_items
    assert reasoning.raw_item.content[0].text == "let me see"
    assert message.raw_item.content[0].text == result.final_output == "sunny"


def test_openais_client_puts_a_stream_together(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(results, "finish_reason", lambda _: "stop")
    parts = [thought("hm"), Part("Both."), *call(0, "f", '{"a": ', "1}"), *call(1, "f", "{}")]
    scripted(monkeypatch, *parts)
    function: Any = {"type": "function", "name": "f", "parameters": {}, "strict": False}

    async def test() -> tuple[Any, Any]:
        async with serving(llm) as client:
            request: Any = {"model": MODEL, "input": "abc", "tools": [function]}
            async with client.responses.stream(**request) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_response()
            return streamed, await client.responses.retrieve(streamed.id)

    streamed, kept = run(test())
    assert streamed.output_text == "Both."
    kinds = [item.type for item in streamed.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert [item.arguments for item in streamed.output[2:]] == ['{"a": 1}', "{}"]
    assert kept.output_text == "Both." and kept.usage == streamed.usage


def test_openais_client_parses_and_converses(llm: LLM):
    async def test() -> None:
        async with serving(llm) as client:
            short: Any = {"model": MODEL, "extra_body": SHORT}
            parsed = await client.responses.parse(input="abc", text_format=Answer, **short)
            assert isinstance(parsed.output_parsed, Answer)
            next_one = await client.responses.create(
                input="so?", previous_response_id=parsed.id, **short
            )
            assert next_one.usage.input_tokens > parsed.usage.total_tokens
            await client.responses.delete(parsed.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(input="so?", previous_response_id=parsed.id, **short)
            assert caught.value.code == "previous_response_not_found"

    run(test())
