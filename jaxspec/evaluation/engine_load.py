"""Drives an engine with requests as they arrive, and notes what clients and its devices see."""

import contextlib
import dataclasses
import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import jax

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.evaluation.benchmarks.workloads import Arrival
from jaxspec.scheduling.balancer import Balancer, Share

USAGE_EVERY = 0.05  # seconds between two looks at the pages
# A JSON string that no request is long enough to end, so that each gets its number of tokens.
ENDLESS = StructuredOutput(json_schema={"type": "string", "minLength": 100_000})


@dataclasses.dataclass
class Client:
    """A request as its client sees it; times are on the test's clock."""

    arrived: float
    generation: Generation
    times: list[float] = dataclasses.field(default_factory=list)  # of each piece
    seen: int = 0  # tokens

    def look(self, now: float) -> None:
        if len(self.generation.token_ids) > self.seen:
            self.seen = len(self.generation.token_ids)
            self.times.append(now)

    @property
    def is_structured(self) -> bool:
        return self.generation.sampling.structured is not None

    @property
    def first_token(self) -> float:
        return self.times[0] - self.arrived

    @property
    def between_tokens(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.seen - 1)


class DeviceWatch:
    """Notes when calls were launched, and when their results were ready.

    A thread waits for the results, since the engine may look at them later. Launching counts as
    idle until it has returned; so the idle time is rather too long than too short.
    """

    def __init__(self):
        self.calls: list[tuple[float, float]] = []  # launched, ready
        self._launched: queue.SimpleQueue[LaunchedCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="device watch", daemon=True)

    def launched(self, calls: list[LaunchedCall]) -> None:
        for call in calls:
            self._launched.put(call)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._launched.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (call := self._launched.get()) is not None:
            jax.block_until_ready(call.emitted)
            self.calls.append((call.launched, time.perf_counter()))

    def idle(self, started: float, finished: float) -> float:
        """Seconds in which no call was in flight."""
        idle, ready = 0.0, started
        for launched, call_ready in self.calls:
            idle += max(0.0, launched - ready)
            ready = max(ready, call_ready)
        return idle + max(0.0, finished - ready)


@dataclasses.dataclass
class Usage:
    """What the pages were used for, looked at now and then."""

    wastes: list[float] = dataclasses.field(default_factory=list)
    used: float = 0.0
    looked: float = 0.0

    def look(self, engine: Engine, now: float) -> None:
        if now - self.looked < USAGE_EVERY:
            return
        usage, self.looked = engine.scheduler.usage(), now
        self.used = max(self.used, usage.used)
        if usage.context:
            self.wastes.append(usage.waste)


class Arrivals:
    """Requests that have not begun yet, shared by the engines of one test.

    A request goes to an engine when its time has come: to the one that ReplicatedLLM would take.
    Each engine has a thread that asks for its requests, whichever thread finds that they are due.

    Args:
      arrivals: in the order of their times.
    """

    def __init__(self, arrivals: Sequence[Arrival], balancer: Balancer, engines: int):
        self._coming = deque(arrivals)
        self._due: list[list[tuple[Arrival, int, Share]]] = [[] for _ in range(engines)]
        self._numbers = itertools.count()
        self._balancer, self._lock = balancer, threading.Lock()

    def take(self, engine: int, seconds: float) -> list[tuple[Arrival, int, Share]]:
        """Requests of this engine that have arrived up to so many seconds after the start, with
        their numbers and the balancer's shares."""
        with self._lock:
            while self._coming and self._coming[0].time <= seconds:
                arrival = self._coming.popleft()
                share = self._balancer.place(arrival.prompt, arrival.new_tokens)
                self._due[share.engine].append((arrival, next(self._numbers), share))
            found, self._due[engine] = self._due[engine], []
            return found

    def next_time(self, engine: int) -> float | None:
        """When the engine should look again, in seconds after the start; None: never."""
        with self._lock:
            if self._due[engine]:
                return self._due[engine][0][0].time
            return self._coming[0].time if self._coming else None

    def end(self, share: Share) -> None:
        """The engine has done this."""
        with self._lock:
            self._balancer.end(share)


class EngineLoad:
    """One engine of a test.

    Attributes:
      clients: the requests that it was given.
      without_requests: seconds in which it had none.
    """

    def __init__(self, engine: Engine, number: int, temperature: float):
        self.engine, self.number, self.temperature = engine, number, temperature
        self.clients: list[Client] = []
        self.usage = Usage()
        self.without_requests = 0.0

    def drive(
        self, arrivals: Arrivals, started: float, clock: Callable[[], float], salt: str
    ) -> None:
        """Add requests as they arrive, and step until all have ended."""
        engine = self.engine
        self.clients, live = [], []
        self.usage, self.without_requests = Usage(), 0.0
        while True:
            for arrival, number, share in arrivals.take(self.number, clock() - started):
                live.append((self._add(arrival, number, started, salt), share))
            if live:
                engine.step()
                self.usage.look(engine, clock())
            elif not engine.scheduler.is_idle:
                engine.step()  # rows of the requests that have ended are released
            elif (coming := arrivals.next_time(self.number)) is not None:
                self.without_requests += _sleep(started + coming - clock())
            else:
                return
            now = clock()
            for client, _ in live:
                client.look(now)
            for _, share in (pair for pair in live if pair[0].generation.done):
                arrivals.end(share)
            live = [pair for pair in live if not pair[0].generation.done]

    def _add(self, arrival: Arrival, number: int, started: float, salt: str) -> Client:
        sampling = SamplingParams(
            temperature=self.temperature,
            seed=number,
            max_tokens=arrival.new_tokens,
            stop_token_ids=(),
            cache_salt=salt,
            structured=ENDLESS if arrival.structured else None,
        )
        client = Client(started + arrival.time, self.engine.add(arrival.prompt, sampling))
        self.clients.append(client)
        return client


def _sleep(seconds: float) -> float:
    started = time.perf_counter()
    time.sleep(max(0.0, seconds))
    return time.perf_counter() - started


@contextlib.contextmanager
def frequent_switches() -> Iterator[None]:
    """Let DeviceWatch note at once that a call is ready, also while the host is busy planning."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
