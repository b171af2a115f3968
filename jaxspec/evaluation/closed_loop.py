"""A closed loop of clients on an engine: each sends a request when its last one has ended."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator

import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation


@dataclasses.dataclass(frozen=True)
class Phase:
    """A number of clients, whose requests all have the acceptance level of this index."""

    clients: int
    level: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Tokens that the clients got in so many seconds, and the rounds of each shape."""

    tokens: int
    seconds: float
    rounds: collections.Counter[TreeShape]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Requests:
    """Random prompts, and how many tokens each is to get: between half of ``new_tokens`` and all.

    Prompts come again and again, so the prefix cache has them after a while.

    Args:
      levels: of acceptance; a request's seed chooses one (see AcceptanceLevels).
    """

    def __init__(self, vocab_size: int, prompt_tokens: int, new_tokens: int, levels: int):
        self.vocab_size, self.prompt_tokens = vocab_size, prompt_tokens
        self.new_tokens, self.levels = new_tokens, levels

    def of_client(self, client: int, level: int) -> Iterator[tuple[list[int], SamplingParams]]:
        """One after the other, without an end."""
        rng = np.random.default_rng(client)
        prompt = rng.integers(self.vocab_size, size=self.prompt_tokens).tolist()
        for number in itertools.count():
            most = int(rng.integers(self.new_tokens // 2, self.new_tokens + 1))
            seed = level + self.levels * (client + 1000 * number)
            yield prompt, SamplingParams(max_tokens=most, seed=seed, stop_token_ids=())


class Clients:
    """Keeps an engine busy, and counts the tokens."""

    def __init__(self, engine: Engine, requests: Requests):
        self.engine, self.requests = engine, requests

    def run(self, phase: Phase, tokens: int, *, warm_up_tokens: int = 0) -> Outcome:
        """Serve the clients until they have so many tokens, all together.

        ``warm_up_tokens`` come before, and are not counted. The requests that are left at
        the end are cancelled. Acceptance depends on seeds and positions, so it is the same again
        whatever the trees are.

        Raises RuntimeError if a request fails.
        """
        loop = _Loop(self.engine, self.requests, phase)
        loop.step_until(warm_up_tokens)
        before, rounds = loop.tokens, self.engine.shapes.rounds.copy()
        started = time.perf_counter()
        loop.step_until(before + tokens)
        seconds, counted = time.perf_counter() - started, loop.tokens - before
        loop.cancel()
        return Outcome(counted, seconds, self.engine.shapes.rounds - rounds)


class _Loop:
    """The clients of one phase."""

    def __init__(self, engine: Engine, requests: Requests, phase: Phase):
        self.engine, self._ended_tokens = engine, 0
        self._coming = [requests.of_client(client, phase.level) for client in range(phase.clients)]
        self._current = [self._next(client) for client in range(phase.clients)]

    def _next(self, client: int) -> Generation:
        return self.engine.add(*next(self._coming[client]))

    @property
    def tokens(self) -> int:
        return self._ended_tokens + sum(len(generation.token_ids) for generation in self._current)

    def step_until(self, tokens: int) -> None:
        while self.tokens < tokens:
            self.engine.step()
            for client, generation in enumerate(self._current):
                if generation.done:
                    if generation.error is not None:
                        raise RuntimeError(f"a request failed: {generation.error}")
                    self._ended_tokens += len(generation.token_ids)
                    self._current[client] = self._next(client)

    def cancel(self) -> None:
        for generation in self._current:
            self.engine.cancel(generation)
        while not self.engine.scheduler.is_idle:
            self.engine.step()
