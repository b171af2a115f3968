"""What a server says of its start: where the time until it was ready went."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax.monitoring

FOUND = "/jax/compilation_cache/cache_hits"
MISSED = "/jax/compilation_cache/cache_misses"


class StartUp:
    """The seconds of a start, by what was done.

    Attributes:
      started: when the process began, by time.perf_counter.
      seconds: of each part that has ended, in order; parts of one name are added up.
      found, missed: programs that were stored, and that were not, where programs are stored.
    """

    def __init__(self, started: float):
        self.started = started
        self.seconds = {"importing": time.perf_counter() - started}
        self.found = self.missed = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of the start."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + taken

    @contextlib.contextmanager
    def counting_stored_programs(self) -> Iterator[None]:
        """Around what compiles, or loads what was stored."""
        jax.monitoring.register_event_listener(self._note)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_listener(self._note)

    def _note(self, event: str, **_: Any) -> None:
        self.found += event == FOUND
        self.missed += event == MISSED

    def line(self) -> str:
        """What the log says when the server is ready."""
        whole = time.perf_counter() - self.started
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items()]
        return f"ready after {whole:.1f} s: {', '.join(parts)}{self._programs()}"

    def _programs(self) -> str:
        if not self.found + self.missed:  # none is stored, or none was compiled
            return ""
        if not self.missed:
            return " (all programs were found stored)"
        return f" ({self.found} of {self.found + self.missed} programs were found stored)"
