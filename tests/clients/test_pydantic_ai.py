"""pydantic-ai: agents with chats and responses."""

from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest

from tests.helpers.clients import ABROAD, CALL, CALLS, SUNNY, Place, client_package
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL, run
from tests.helpers.spoken import Script, called

pydantic_ai = client_package("pydantic_ai")
models = client_package("pydantic_ai.models.openai")
OpenAIProvider = client_package("pydantic_ai.providers.openai").OpenAIProvider
pytestmark = pytest.mark.slow
KINDS = {"chats": "OpenAIChatModel", "responses": "OpenAIResponsesModel"}
APIS = pytest.mark.parametrize("api", KINDS)


def asked[T](
    listener: Listening,
    api: str,
    test: Callable[[Any], Coroutine[Any, Any, T]],
    *tools: Any,
    name: str = MODEL,
    key: str = KEY,
    **options: Any,
) -> T:
    """The result of a test with an agent. ``options`` are the agent's."""

    async def with_client() -> T:
        async with openai.AsyncOpenAI(base_url=listener.url, api_key=key, max_retries=0) as client:
            model = getattr(models, KINDS[api])(name, provider=OpenAIProvider(openai_client=client))
            settings = {"max_tokens": 200}
            agent = pydantic_ai.Agent(
                model, model_settings=settings, tools=tools, retries=2, **options
            )
            return await test(agent)

    return run(with_client())


@APIS
def test_an_agent_calls_a_tool_and_goes_on(
    listener: Listening, says: Callable[..., Script], api: str
):
    script, cities = says(CALLS, SUNNY), list[str]()

    def weather(city: str) -> str:
        cities.append(city)
        return "12 °C"

    result = asked(listener, api, lambda agent: agent.run("abc"), weather)
    assert result.output == SUNNY and cities == ["Zürich"]
    assert CALL in script.prompts[1] and "<tool>12 °C</tool>" in script.prompts[1]
    assert "<think>\nschön\n</think>" in script.prompts[1]
    assert result.usage.requests == 2


@APIS
def test_wrong_arguments_are_told_to_the_model(
    listener: Listening, says: Callable[..., Script], api: str
):
    wrong = called("weather", '{"town": "Oslo"}')
    script = says(wrong, CALL, SUNNY)

    def weather(city: str) -> str:
        return city

    assert asked(listener, api, lambda agent: agent.run("abc"), weather).output == SUNNY
    assert wrong in script.prompts[1] and "<tool>Zürich</tool>" in script.prompts[2]


@APIS
def test_a_stream_comes_in_pieces(listener: Listening, says: Callable[..., Script], api: str):
    says(ABROAD)

    async def test(agent: Any) -> list[str]:
        async with agent.run_stream("abc") as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    pieces = asked(listener, api, test)
    assert "".join(pieces) == ABROAD and len(pieces) > 3


@APIS
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_output_is_of_the_class(brief: Listening, api: str, kind: str):
    wanted = getattr(pydantic_ai, kind)(Place)
    result = asked(brief, api, lambda agent: agent.run("abc"), output_type=wanted)
    assert isinstance(result.output, Place)


@APIS
def test_errors_are_the_clients(server: Listening, api: str):
    for name, key, status in (("other", KEY, 404), (MODEL, "other", 401)):
        with pytest.raises(pydantic_ai.exceptions.ModelHTTPError) as caught:
            asked(server, api, lambda agent: agent.run("abc"), name=name, key=key)
        assert caught.value.status_code == status
