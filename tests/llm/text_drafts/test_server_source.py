"""Text of another server: what is asked, and what happens when it does not answer."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.llm.text_drafts.server_source import ServerSource
from tests.helpers.listening import listening
from tests.helpers.served import MODEL

TEXTS = {"7": "one two", "8": "", "9": "three"}


class Completions(http.server.BaseHTTPRequestHandler):
    """Writes each prompt's first letters again, the last prompt first."""

    bodies: ClassVar[list[Any]] = []
    answer = 200

    def do_GET(self) -> None:
        self._send({"data": [{"id": "small"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append((self.path, body))
        prompts = enumerate(body["prompt"])
        choices = [{"index": i, "text": text[: body["max_tokens"]]} for i, text in prompts]
        self._send({"choices": choices[::-1]})

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(self.answer)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Completions]]]:
    handler = type("Handler", (Completions,), {"bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}", handler
        found.shutdown()
        thread.join()


def test_a_round_is_one_request(server: tuple[str, type[Completions]]):
    url, handler = server
    source = ServerSource(f"{url}/v1/")
    assert source.continue_texts(TEXTS, 3) == {"7": "one", "9": "thr"}
    [(path, body)] = handler.bodies
    assert path == "/v1/completions"
    prompts = ["one two", "three"]
    assert body == {"model": "small", "prompt": prompts, "max_tokens": 3, "temperature": 0}
    assert source.continue_texts({"8": ""}, 3) == {}
    assert len(handler.bodies) == 1


def test_a_server_that_fails_is_left_alone_for_a_while(server: tuple[str, type[Completions]]):
    url, handler = server
    told: list[str] = []
    source = ServerSource(url, pause=0.0, on_warning=told.append)
    handler.answer = 503
    for _ in range(2):
        assert source.continue_texts(TEXTS, 3) == {}
    assert len(told) == 1 and "status 503" in told[0]
    handler.answer = 200
    assert source.continue_texts(TEXTS, 3) == {"7": "one", "9": "thr"}
    patient = ServerSource(url, on_warning=told.append)
    assert patient.is_ready
    handler.answer = 500
    assert patient.continue_texts(TEXTS, 3) == {}
    asked = len(handler.bodies)
    assert not patient.is_ready
    assert patient.continue_texts(TEXTS, 3) == {}
    assert len(handler.bodies) == asked, "it is not asked again at once"


@pytest.mark.slow
def test_our_own_server_is_a_source(byte_llm: LLM):
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    texts = {"1": "abc", "2": "the end of"}
    wanted = [found.text for found in byte_llm.generate(list(texts.values()), sampling)]
    with listening(byte_llm) as server:
        source = ServerSource(server.root, timeout=60)
        assert source.model == MODEL
        assert list(source.continue_texts(texts, 5).values()) == wanted


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "does not list its models"),
        ("http://192.0.2.1:8000", "of this machine"),
        ("https://127.0.0.1:8000", "of this machine"),
        ("http://127.0.0.1:8000/v2", "of this machine"),
        ("http://127.0.0.1:port", "of this machine"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, message: str):
    with pytest.raises(ValueError, match=message) as error:
        ServerSource(url)
    assert "\n" not in str(error.value)
