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
    """JSON of a response, of the items that it was asked with, and of the messages of the
    conversation up to its end, without instructions."""

    response: bytes
    items: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + len(self.messages)


class _Shelf:
    """What is kept for a client, by its name; the first was used least recently."""

    def __init__(self):
        self.kept: collections.OrderedDict[str, Stored] = collections.OrderedDict()
        self.bytes = 0

    def add(self, name: str, stored: Stored) -> None:
        self.kept[name] = stored
        self.bytes += stored.size

    def remove(self, name: str) -> None:
        self.bytes -= self.kept.pop(name).size


class ResponseStore:
    """Keeps the responses that each client used last.

    Args:
      most, most_bytes: of the responses of a client. One that is larger than that alone is not
        kept. 0: none is.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return bool(self._most and self._most_bytes)

    def add(
        self,
        client: str,
        name: str,
        response: str,
        items: list[dict[str, Any]],
        messages: list[dict[str, Any]],
    ) -> None:
        """Keep a response, and let go of those that the client used least recently."""
        inputs, said = json.dumps(items).encode(), json.dumps(messages).encode()
        stored = Stored(response.encode(), inputs, said)
        if stored.size > self._most_bytes or not self.keeps:
            return
        shelf = self._shelves.setdefault(client, _Shelf())
        shelf.add(name, stored)
        while len(shelf.kept) > self._most or shelf.bytes > self._most_bytes:
            shelf.remove(next(iter(shelf.kept)))

    def response(self, client: str, name: str) -> bytes:
        """JSON. Raises ApiError for one that is not kept."""
        return self._of(client, name, "response_id").response

    def items(self, client: str, name: str) -> list[dict[str, Any]]:
        """That it was asked with. Raises ApiError for a response that is not kept."""
        return json.loads(self._of(client, name, "response_id").items)

    def messages(self, client: str, name: str) -> list[dict[str, Any]]:
        """The conversation's messages. Raises ApiError for a response that is not kept."""
        return json.loads(self._of(client, name, "previous_response_id").messages)

    def remove(self, client: str, name: str) -> None:
        """Raises ApiError for a response that is not kept."""
        self._of(client, name, "response_id")
        self._shelves[client].remove(name)

    def _of(self, client: str, name: str, param: str) -> Stored:
        shelf = self._shelves.get(client)
        if shelf is None or name not in shelf.kept:
            is_previous = param == "previous_response_id"
            raise ApiError(
                404,
                f"there is no response {name[:80]!r}: responses are kept for a while, unless "
                "store is false",
                param=param,
                code="previous_response_not_found" if is_previous else "response_not_found",
            )
        shelf.kept.move_to_end(name)
        return shelf.kept[name]
