"""Responses that are kept, so that they can be asked for, and conversations can go on."""

import collections
import dataclasses
import json
from typing import Any

from jaxspec.serving.errors import ApiError

MOST_RESPONSES = 10_000
MOST_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Stored:
    """JSON of a response, and of the messages of the conversation up to its end, without
    instructions."""

    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Keeps the responses that were used last.

    Args:
      most, most_bytes: of responses. One that is larger than that alone is not kept.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        # By the client that asked for them, and their ids.
        self._kept: collections.OrderedDict[tuple[str, str], Stored] = collections.OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, client: str, name: str, response: str, messages: list[dict[str, Any]]) -> None:
        """Keep a response, and let go of those used least recently."""
        stored = Stored(response.encode(), json.dumps(messages).encode())
        if stored.size > self._most_bytes:
            return
        self._kept[client, name] = stored
        self._bytes += stored.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.size

    def response(self, client: str, name: str) -> bytes:
        """JSON. Raises ApiError for one that is not kept."""
        return self._of(client, name, "response_id").response

    def messages(self, client: str, name: str) -> list[dict[str, Any]]:
        """Of the conversation. Raises ApiError for a response that is not kept."""
        return json.loads(self._of(client, name, "previous_response_id").messages)

    def remove(self, client: str, name: str) -> None:
        """Raises ApiError for a response that is not kept."""
        self._of(client, name, "response_id")
        self._bytes -= self._kept.pop((client, name)).size

    def _of(self, client: str, name: str, param: str) -> Stored:
        if (client, name) not in self._kept:
            is_previous = param == "previous_response_id"
            raise ApiError(
                404,
                f"there is no response {name[:80]!r}: responses are kept for a while, unless "
                "store is false",
                param=param,
                code="previous_response_not_found" if is_previous else "response_not_found",
            )
        self._kept.move_to_end((client, name))
        return self._kept[client, name]
