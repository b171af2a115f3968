"""How much each client may ask for in a minute."""

import collections
import math
import time
from collections.abc import Callable

from jaxspec.serving.errors import ApiError

MOST_CLIENTS = 10_000  # whose use is remembered


class Allowance:
    """So much a minute, and at most a minute's at once. It may be overdrawn."""

    def __init__(self, per_minute: float, clock: Callable[[], float]):
        self._per_second, self._most, self._clock = per_minute / 60, per_minute, clock
        self._left, self._at = per_minute, clock()

    def spend(self, amount: float) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second) - amount
        self._at = now

    def seconds_until(self, amount: float) -> float:
        """Until so much is left; 0: now."""
        self.spend(0)
        return max(0.0, (amount - self._left) / self._per_second)


class Rates:
    """Requests and tokens a minute of every client.

    Tokens of a prompt count when the request begins, generated ones when they are known. Whoever
    has spent more than there was waits until there is some again.

    Args:
      requests, tokens: a minute of one client; None: as many as it likes.
    """

    def __init__(
        self,
        requests: int | None = None,
        tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        for name, value in (("requests", requests), ("tokens", tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} per minute must be at least 1, got {value}")
        self._limits = {"requests": requests, "tokens": tokens}
        self._clock = clock
        self._clients: collections.OrderedDict[str, dict[str, Allowance]] = (
            collections.OrderedDict()
        )

    def admit(self, client: str) -> None:
        """Count a request. Raises ApiError (429) if the client must wait."""
        allowances = self._of(client)
        for name, allowance in allowances.items():
            seconds = math.ceil(allowance.seconds_until(1))
            if seconds > 0:
                raise ApiError(
                    429,
                    f"more than {self._limits[name]} {name} a minute: try again in {seconds} s",
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(seconds)},
                )
        if "requests" in allowances:
            allowances["requests"].spend(1)

    def spend(self, client: str, tokens: int) -> None:
        allowances = self._of(client)
        if "tokens" in allowances:
            allowances["tokens"].spend(tokens)

    def _of(self, client: str) -> dict[str, Allowance]:
        if client not in self._clients:
            self._clients[client] = {
                name: Allowance(limit, self._clock)
                for name, limit in self._limits.items()
                if limit is not None
            }
        self._clients.move_to_end(client)
        if len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        return self._clients[client]
