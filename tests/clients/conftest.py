"""Tiny models for the tests of clients, and a server that listens for all of them."""

from collections.abc import Callable, Iterator

import pytest

from jaxspec import LLM
from jaxspec.config.engine import EngineConfig
from tests.helpers.checkpoints import tiny_byte_llama
from tests.helpers.engines import CHAIN
from tests.helpers.listening import KEY, Listening, listening
from tests.helpers.spoken import END, ENDS, Script, spoken

LENGTH = 8192  # tokens, which are bytes, of a conversation

# In the manner of Qwen3's and Hermes': calls and reasoning are told as the model wrote them.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Clients take seconds to import: runs without slow tests leave their files out."""
    return True if "not slow" in config.option.markexpr else None


@pytest.fixture(scope="session")
def llm(byte_llm: LLM) -> LLM:
    return byte_llm


@pytest.fixture(scope="session")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """It holds conversations of some length, and asks for a key."""
    path = tmp_path_factory.mktemp("clients")
    tiny_byte_llama(path, eos_token_id=END, max_position_embeddings=LENGTH)
    config = EngineConfig(max_rows=4, rounds_per_call=1, max_queue=64)
    llm = LLM(path, "ngram", speculation=CHAIN, max_length=LENGTH, page_size=64, engine=config)
    with listening(llm, chat_template=TEMPLATE, api_keys=[KEY]) as found:
        yield found


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "listener" in request.fixturenames:
        service = request.getfixturevalue("listener").server.service
        service.sampling_defaults, service.template_variables = {}, {}


@pytest.fixture
def server(listener: Listening) -> Listening:
    """Its answers are greedy, and end only at their limit of tokens."""
    listener.samples(temperature=0.0)
    return listener


@pytest.fixture
def brief(listener: Listening) -> Listening:
    """Its answers end as soon as they may, which a schema says. It does not reason."""
    listener.samples(**ENDS)
    listener.server.service.template_variables = {"enable_thinking": False}
    return listener


@pytest.fixture
def says(listener: Listening, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    """Lets the server say texts. Each ends by itself; one that is a Cut goes on up to the request's
    limit of tokens, as far as the client can tell."""
    return lambda *texts: spoken(monkeypatch, listener, *texts)
