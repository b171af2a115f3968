"""Ten steps of an agent with OpenAI's chats: the conversation goes back as the client keeps it."""

from collections.abc import Callable
from typing import Any

import openai
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


class Chats:
    """An agent of OpenAI's chats, and its conversation."""

    def __init__(self, url: str):
        self.client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        self.messages: list[Any] = [{"role": "user", "content": "abc"}]
        functions = [{"name": name, "parameters": PARAMETERS} for name in TOOLS]
        tools = [{"type": "function", "function": function} for function in functions]
        self.asked: Any = {"model": MODEL, "max_tokens": LIMIT, "tools": tools}

    def step(self, streams: bool) -> Any:
        """The next answer. It is echoed with all that it has."""
        asked, chats = {**self.asked, "messages": self.messages}, self.client.chat.completions
        if streams:
            with chats.stream(**asked) as stream:
                stream.until_done()
                choice = stream.get_final_completion().choices[0]
        else:
            choice = chats.create(**asked).choices[0]
        self.messages.append(choice.message.model_dump())
        return choice

    def cut_stream(self) -> Any:
        """The call of an answer that is cut. The client's helper would raise; its chunks do not."""
        asked = {**self.asked, "messages": self.messages, "stream": True}
        chunks = list(self.client.chat.completions.create(**asked))
        assert chunks[-1].choices[0].finish_reason == "length"
        uses = [use for chunk in chunks for use in chunk.choices[0].delta.tool_calls or []]
        arguments = "".join(use.function.arguments for use in uses)
        function = {"name": uses[0].function.name, "arguments": arguments}
        return {"id": uses[0].id, "type": "function", "function": function}

    def answer_calls(self, choice: Any) -> None:
        for use in choice.message.tool_calls or []:
            self.answer(use.id, result_of(use.function.name, use.function.arguments)[0])

    def answer(self, name: str, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": name, "content": content})


@MODES
def test_ten_steps(listener: Listening, says: Callable[..., Script], streams: bool):
    script, agent = says(*STEPS), Chats(listener.url)
    ids: list[str] = []
    choice: Any = None
    for _ in STEPS:
        choice = agent.step(streams)
        ids += [use.id for use in choice.message.tool_calls or []]
        agent.answer_calls(choice)
    assert choice.finish_reason == "stop" and choice.message.content == "Sunny – ☀️ in Zürich."
    assert choice.message.reasoning_content == "done"
    assert len(ids) == len(set(ids)) == 11
    check_history(script)


@MODES
def test_it_goes_on_after_a_cut_call_and_an_unknown_one(
    listener: Listening, says: Callable[..., Script], streams: bool
):
    script, agent = says(Cut(CUT), WEATHER, "Sunny."), Chats(listener.url)
    if streams:
        use = agent.cut_stream()
        agent.messages.append({"role": "assistant", "content": None, "tool_calls": [use]})
        agent.answer(use["id"], "the arguments are no JSON")
    else:
        choice = agent.step(streams=False)
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls[0].function.arguments == '{"city": "東'
        agent.answer_calls(choice)
    unknown = {"name": "of_another", "arguments": "{}"}
    calls = [{"id": "other", "type": "function", "function": unknown}]
    agent.messages.append({"role": "assistant", "tool_calls": calls})
    agent.answer("other", "")
    choice = agent.step(streams)
    assert choice.finish_reason == "tool_calls"
    agent.answer_calls(choice)
    assert agent.step(streams).message.content == "Sunny."
    assert CUT in script.prompts[1] and '"of_another", "arguments": {}' in script.prompts[2]
