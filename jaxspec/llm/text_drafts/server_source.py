"""A server of OpenAI's API on this machine, as the source of text."""

import http.client
import ipaddress
import json
import time
import urllib.parse
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.llm.text_drafts.drafter import TextSource

TIMEOUT = 5.0  # seconds; the target waits for a draft
PAUSE = 30.0  # seconds without drafts after a request that failed
MOST_BYTES = 1 << 24  # of an answer
LONGEST_TOKEN = 256  # characters; a server may write more tokens than it is asked for
_ERRORS = (
    *(OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),  # of numbers and depths that JSON allows
)


class ServerSource(TextSource):
    """Continues texts with what ``/v1/completions`` of a server writes at temperature 0.

    If the server does not answer, nothing is drafted for a while: texts come more slowly, and are
    the same. That is said once.

    Args:
      url: of this machine, such as ``http://127.0.0.1:8001``, with or without ``/v1``.
      on_warning: what is called with the message; by default warnings.warn.

    Raises ValueError for another URL, and if no server there lists its models.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT,
        pause: float = PAUSE,
        on_warning: Callable[[str], object] = warnings.warn,
    ):
        self.url, self._timeout, self._pause = url, timeout, pause
        self._host, self._port, self._path = _address(url)
        self.on_warning, self._told, self._ready_at = on_warning, False, 0.0
        try:
            self.model = str(self._ask("GET", "/models")["data"][0]["id"])
        except (*_ERRORS, IndexError) as error:
            raise ValueError(
                f"drafter 'text:{url}': {url} does not list its models: {_reason(error)}"
            ) from error

    @property
    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready_at

    def forget(self, request_id: str) -> None:
        """Nothing is kept of requests."""

    def continue_texts(self, texts: Mapping[str, str], tokens: int) -> Mapping[str, str]:
        texts = {name: text for name, text in texts.items() if text}
        if not (texts and self.is_ready):
            return {}
        body = {
            "model": self.model,
            "prompt": list(texts.values()),
            "max_tokens": tokens,
            "temperature": 0,
        }
        try:
            choices = self._ask("POST", "/completions", body)["choices"]
            found = {int(choice["index"]): str(choice["text"]) for choice in choices}
        except _ERRORS as error:
            self._failed(error)
            return {}
        most = tokens * LONGEST_TOKEN
        return {name: _whole(found.get(place, "")[:most]) for place, name in enumerate(texts)}

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        end = time.monotonic() + self._timeout
        try:
            content = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            answer = b""
            while part := response.read1(MOST_BYTES):
                answer += part
                if len(answer) > MOST_BYTES or time.monotonic() > end:
                    raise ValueError(f"its answer has {len(answer)} bytes and does not end")
            if response.length:
                raise http.client.IncompleteRead(answer, response.length)
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            return json.loads(answer)
        finally:
            connection.close()

    def _failed(self, error: Exception) -> None:
        self._ready_at = time.monotonic() + self._pause
        if not self._told:
            self._told = True
            self.on_warning(
                f"nothing is drafted: {self.url} gave no completions ({_reason(error)}). It is "
                f"asked again every {self._pause:.0f} seconds"
            )


def _whole(text: str) -> str:
    """The text before a half of a surrogate pair, which JSON allows and no tokenizer reads."""
    halves = (place for place, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    return text[: next(halves, len(text))]


def _address(url: str) -> tuple[str, int, str]:
    """Host, port and path of a URL. Raises ValueError for one that is not of this machine."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    path = parts.path.rstrip("/") if local else ""
    if not local or parts.scheme != "http" or parts.query or path not in ("", "/v1"):
        raise ValueError(
            f"drafter 'text:{url}': after text: give http:// and a port of this machine, as in "
            "text:http://127.0.0.1:8001. It gets the texts of all requests"
        )
    return host, port, "/v1"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
