"""Ten steps of an agent with Anthropic's messages, by hand and with the client's tool runner."""

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests.helpers.agent_steps import (
    CUT,
    LIMIT,
    PARAMETERS,
    STEPS,
    TOOLS,
    WEATHER,
    check_history,
    result_of,
)
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Cut, Script

pytestmark = pytest.mark.slow
MODES = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
ASKED: Any = {"model": MODEL, "max_tokens": LIMIT}
ASKED["tools"] = [{"name": name, "input_schema": PARAMETERS} for name in TOOLS]


@pytest.fixture
def client(listener: Listening) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=listener.root, api_key=KEY, max_retries=0) as found:
        yield found


def step(client: anthropic.Anthropic, messages: list[Any], streams: bool) -> Any:
    """The next answer, which is echoed as it is."""
    if streams:
        with client.messages.stream(messages=messages, **ASKED) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(messages=messages, **ASKED)
    messages.append({"role": "assistant", "content": message.content})
    return message


def results(message: Any) -> list[Any]:
    found = []
    for use in message.content:
        if use.type == "tool_use":
            text, is_error = result_of(use.name, use.input)
            told = {"type": "tool_result", "tool_use_id": use.id, "is_error": is_error}
            found.append(told if text == "" else {**told, "content": text})
    return found


@MODES
def test_ten_steps(client: anthropic.Anthropic, says: Callable[..., Script], streams: bool):
    script = says(*STEPS)
    messages: list[Any] = [{"role": "user", "content": "abc"}]
    ids: list[str] = []
    message: Any = None
    for _ in STEPS:
        message = step(client, messages, streams)
        ids += [use.id for use in message.content if use.type == "tool_use"]
        if found := results(message):
            assert message.stop_reason == "tool_use"
            messages.append({"role": "user", "content": found})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == "Sunny – ☀️ in Zürich." and message.stop_reason == "end_turn"
    assert len(ids) == len(set(ids)) == 11
    check_history(script)


@MODES
def test_it_goes_on_after_a_cut_call_and_an_unknown_one(
    client: anthropic.Anthropic, says: Callable[..., Script], streams: bool
):
    script = says(Cut(CUT), WEATHER, "Sunny.")
    messages: list[Any] = [{"role": "user", "content": "abc"}]
    message = step(client, messages, streams)
    assert message.stop_reason == "max_tokens" and message.content[0].type == "tool_use"
    messages.append({"role": "user", "content": results(message)})
    other = {"type": "tool_use", "id": "other", "name": "of_another", "input": {}}
    messages.append({"role": "assistant", "content": [other]})
    told = {"type": "tool_result", "tool_use_id": "other", "content": [], "is_error": True}
    messages.append({"role": "user", "content": [told]})
    message = step(client, messages, streams)
    messages.append({"role": "user", "content": results(message)})
    assert step(client, messages, streams).content[0].text == "Sunny."
    assert '"of_another", "arguments": {}' in script.prompts[1]


def test_the_runner_of_the_client_takes_ten_steps(
    client: anthropic.Anthropic, says: Callable[..., Script]
):
    script = says(*STEPS)
    tools = [anthropic.beta_tool(tool) for tool in TOOLS.values()]
    runner = client.beta.messages.tool_runner(
        tools=tools,
        messages=[{"role": "user", "content": "abc"}],
        model=MODEL,
        max_tokens=LIMIT,
    )
    last: Any = runner.until_done()
    assert last.content[-1].text == "Sunny – ☀️ in Zürich."
    check_history(script)
