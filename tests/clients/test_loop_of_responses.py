"""Ten steps of an agent of openai-agents in its default: responses, echoed item by item."""

from collections.abc import Callable
from typing import Any

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

from tests.helpers.agent_steps import CUT, LIMIT, STEPS, TOOLS, WEATHER, check_history
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL, run
from tests.helpers.spoken import Cut, Script

pytestmark = pytest.mark.slow
MODES = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])


async def run_agent(url: str, given: Any, *, streams: bool, keeps: bool = False) -> Any:
    """The result of an agent with the tools. A tool that raises is told to the model."""
    set_tracing_disabled(True)  # it would send what it does elsewhere
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        agent = Agent(
            name="a",
            model=OpenAIResponsesModel(model=MODEL, openai_client=client),
            tools=[function_tool(tool) for tool in TOOLS.values()],
            model_settings=ModelSettings(max_tokens=LIMIT),
        )
        options: Any = {"auto_previous_response_id": keeps, "max_turns": len(STEPS) + 1}
        if not streams:
            return await Runner.run(agent, given, **options)
        result = Runner.run_streamed(agent, given, **options)
        async for _ in result.stream_events():
            pass
        return result


@pytest.mark.parametrize("keeps", [False, True], ids=["whole input", "previous_response_id"])
@MODES
def test_ten_steps(listener: Listening, says: Callable[..., Script], streams: bool, keeps: bool):
    script = says(*STEPS)
    result = run(run_agent(listener.url, "abc", streams=streams, keeps=keeps))
    assert result.final_output == "Sunny – ☀️ in Zürich."
    kinds = [item.type for item in result.new_items]
    assert kinds.count("tool_call_item") == kinds.count("tool_call_output_item") == 11
    assert kinds.count("reasoning_item") == 4
    ids = [item.raw_item.call_id for item in result.new_items if item.type == "tool_call_item"]
    assert len(set(ids)) == 11
    assert result.context_wrapper.usage.requests == len(STEPS)
    check_history(script, broken="An error occurred while running the tool")


@MODES
def test_a_cut_call_is_told_to_the_agent(
    listener: Listening, says: Callable[..., Script], streams: bool
):
    says(Cut(CUT))
    with pytest.raises(ModelBehaviorError, match="incomplete"):
        run(run_agent(listener.url, "abc", streams=streams))


def test_the_agent_may_go_on_after_a_cut_call_and_an_unknown_one(
    listener: Listening, says: Callable[..., Script]
):
    script = says(Cut(CUT), WEATHER, "Sunny.")
    with openai.OpenAI(base_url=listener.url, api_key=KEY, max_retries=0) as client:
        given: list[Any] = [{"role": "user", "content": "abc"}]
        asked: Any = {"model": MODEL, "max_output_tokens": LIMIT}
        tool: Any = {"type": "function", "name": "weather", "parameters": {}, "strict": False}
        cut = client.responses.create(input=given, tools=[tool], **asked)
    assert cut.status == "incomplete"
    [use] = cut.output
    assert use.type == "function_call" and use.status == "incomplete"
    assert use.arguments == '{"city": "東'
    told = {"type": "function_call_output", "call_id": use.call_id, "output": "no JSON"}
    other: dict[str, Any] = {"call_id": "other", "name": "of_another", "arguments": "{}"}
    more = [
        {"type": "function_call", **other},
        {"type": "function_call_output", "call_id": "other", "output": ""},
    ]
    given += [use.model_dump(), told, *more]
    result = run(run_agent(listener.url, given, streams=False))
    assert result.final_output == "Sunny."
    assert CUT in script.prompts[1] and '"of_another", "arguments": {}' in script.prompts[1]
