"""Text of another server: what is asked, and what happens when it does not answer."""

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.llm.text_drafts.server_source import LONGEST_TOKEN, MOST_BYTES, ServerSource
from tests.helpers.listening import listening
from tests.helpers.served import MODEL

TEXTS = {"7": "one two", "8": "", "9": "three"}


class Completions(http.server.BaseHTTPRequestHandler):
    """Writes each prompt's first letters again, the last prompt first."""

    bodies: ClassVar[list[Any]] = []
    answer = 200
    content: bytes | None = None  # the answer's, whatever is asked
    missing, pause = 0, 0.0  # bytes that do not come, and seconds between those that do

    def do_GET(self) -> None:
        self._send({"data": [{"id": "small"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append((self.path, body))
        if self.content is not None:
            self._send_slowly(self.content)
            return
        prompts = enumerate(body["prompt"])
        choices = [{"index": i, "text": text[: body["max_tokens"]]} for i, text in prompts]
        self._send({"choices": choices[::-1]})

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(self.answer)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_slowly(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + self.missing))
        self.end_headers()
        step = 1 if self.pause else len(content)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(content), step):
                self.wfile.write(content[at : at + step])
                time.sleep(self.pause)

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


@pytest.mark.parametrize(
    ("content", "missing", "found", "reason"),
    [
        (b'{"choices": [{"index": 0, "text": "a\\ud83d"}]}', 0, {"7": "a", "9": ""}, None),
        (b'{"choices": [{"index": 0, "text": "%s"}]}' % (b"b" * 2000), 0, None, None),
        (b'{"choices": [{"index": 1e999, "text": "a"}]}', 0, {}, "OverflowError"),
        (b"[" * 100_000, 0, {}, "RecursionError"),
        (b'{"choices": []}', 9, {}, "IncompleteRead"),
        (b"x" * (MOST_BYTES + 9), 0, {}, "does not end"),
    ],
    ids=["half a pair", "more than asked", "infinite", "deep", "cut off", "endless"],
)
def test_strange_answers_are_no_errors(
    content: bytes, missing: int, found: Any, reason: str | None, server: Any
):
    url, handler = server
    handler.content, handler.missing, told = content, missing, []
    answer = ServerSource(url, on_warning=told.append).continue_texts(TEXTS, 3)
    assert answer == ({"7": "b" * 3 * LONGEST_TOKEN, "9": ""} if found is None else found)
    assert [reason in one for one in told] == ([] if reason is None else [True])


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(
    server: tuple[str, type[Completions]],
):
    url, handler = server
    handler.content, handler.pause = b" " * 1000, 0.02
    told: list[str] = []
    source, begun = ServerSource(url, timeout=0.2, on_warning=told.append), time.monotonic()
    assert source.continue_texts(TEXTS, 3) == {}
    assert time.monotonic() - begun < 10
    assert len(told) == 1 and "does not end" in told[0]


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
