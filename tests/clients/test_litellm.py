"""litellm, which calls chats, completions, responses and messages."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.clients import ABROAD, CALL, CALLS, SUNNY, TOOL, Place, client_package
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Script

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches prices when it is imported
litellm = client_package("litellm")
pytestmark = [
    pytest.mark.slow,
    # Of its types, which it makes at the first request.
    pytest.mark.filterwarnings("ignore:Items? .* `ReadOnly` qualifier:UserWarning"),
]
SAYS: Any = [{"role": "user", "content": "abc"}]


@pytest.fixture
def asked(listener: Listening) -> Any:
    litellm.disable_streaming_logging = True
    return {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": listener.url,
        "api_key": KEY,
        "max_tokens": 200,
        "num_retries": 0,
    }


@pytest.mark.usefixtures("server")
def test_a_stream_is_the_whole_answer(asked: Any):
    asked = {**asked, "messages": SAYS, "max_tokens": 24}
    whole = litellm.completion(**asked).choices[0]
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"
    asked = {**asked, "model": f"text-completion-openai/{MODEL}", "prompt": "abc"}
    del asked["messages"]
    whole = litellm.text_completion(**asked).choices[0].text
    chunks = list(litellm.text_completion(**asked, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole and whole


@pytest.mark.usefixtures("brief")
def test_structured_output_and_characters_of_several_tokens(asked: Any):
    answer = litellm.completion(**asked, messages=SAYS, response_format=Place)
    Place.model_validate_json(answer.choices[0].message.content)
    only: Any = {"structured_outputs": {"choice": [ABROAD]}}
    chunks = list(litellm.completion(**asked, messages=SAYS, extra_body=only, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == ABROAD and len(pieces) > 10


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_answer_read(
    asked: Any, says: Callable[..., Script], streams: bool
):
    script = says(CALLS, SUNNY)

    def answer(messages: Any) -> Any:
        found = litellm.completion(**asked, messages=messages, tools=[TOOL], stream=streams)
        return litellm.stream_chunk_builder(list(found)) if streams else found

    choice = answer(SAYS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "schön"
    [use] = choice.message.tool_calls
    assert json.loads(use.function.arguments) == {"city": "Zürich"}
    result = {"role": "tool", "tool_call_id": use.id, "content": "12 °C"}
    last = answer([*SAYS, choice.message.model_dump(), result]).choices[0]
    assert last.message.content == SUNNY and last.finish_reason == "stop"
    assert CALL in script.prompts[1] and "schön\n</think>" in script.prompts[1]


def test_responses_and_messages(asked: Any, says: Callable[..., Script], listener: Listening):
    says(CALLS, SUNNY, SUNNY)
    del asked["max_tokens"]
    response = litellm.responses(
        **{**asked, "model": f"openai/{MODEL}"},
        input="abc",
        tools=[{"type": "function", **TOOL["function"]}],
    )
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call"]
    stream = litellm.responses(**{**asked, "model": f"openai/{MODEL}"}, input="abc", stream=True)
    pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == SUNNY and len(pieces) > 1
    asked |= {"model": f"anthropic/{MODEL}", "api_base": listener.root}
    last = litellm.completion(**asked, messages=SAYS, max_tokens=50).choices[0]
    assert last.message.content == SUNNY


@pytest.mark.usefixtures("server")
def test_errors_are_the_clients(asked: Any):
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**asked, "api_key": "other"}, messages=SAYS)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "hosted_vllm/other"}, messages=SAYS)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[{"role": "user", "content": "a" * 9000}])
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=SAYS, temperature=-1)
