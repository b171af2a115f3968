"""What XLA compiles while a test runs, for the fixture ``compilations`` of conftest.py."""

import contextlib
import threading
from collections.abc import Iterator

import jax.monitoring

Compilations = list[tuple[str, threading.Thread]]


@contextlib.contextmanager
def compilations_meanwhile() -> Iterator[Compilations]:
    """Names of programs, and the threads that wait for them."""
    found: Compilations = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append((str(kwargs["fun_name"]), threading.current_thread()))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
