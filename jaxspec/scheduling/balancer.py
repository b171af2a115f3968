"""Which of several engines a request goes to."""

import dataclasses
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Self

from jaxspec.config.engine import EngineConfig

PAUSE = 1.0  # seconds that an engine is passed over after a failure; twice as long after the next
LONGEST_PAUSE = 64.0


@dataclasses.dataclass(frozen=True)
class Share:
    """Work that an engine was given.

    Attributes:
      engine: its number.
      requests, tokens: how much it is.
      failures: those of the engine before.
    """

    engine: int
    requests: int
    tokens: int
    failures: int = 0


class Balancer:
    """Places requests on engines that hold the same model.

    A request goes to the engine that was given most of the beginning of its prompt before, as that
    engine has its KV cached. Engines with over ``slack`` requests more than another one are left
    out. Where that leaves several: the one with the fewest requests (running and waiting), then the
    fewest tokens, then the shortest memory of prompts.

    An engine that fails looks idle, as its requests end at once. So it is passed over for a while,
    which doubles with every failure in a row, and then it gets one prompt in each such while, until
    one ends well. Where all engines are passed over, those with the fewest failures in a row serve.

    What the caches hold is remembered here, not asked for: the answer would have to wait for a call
    of each engine, and would not know of prompts that wait. Old prompts are forgotten as the caches
    forget them, about. A wrong memory costs time, and changes no text.

    Args:
      engines: how many there are.
      slack: requests that an engine may have beyond the fewest of any.
      most_requests: that an engine takes; further ones go to the engine with the fewest. None: any
        number.
      block: tokens of a page of the caches.
      known_blocks: pages of a cache; 0: nothing is cached.
      clock: gives seconds.

    Attributes:
      requests, tokens: that each engine has.
      failures: of each engine. What was under way at a failure is one failure.
    """

    def __init__(
        self,
        engines: int,
        *,
        slack: int,
        most_requests: int | None = None,
        block: int = 16,
        known_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.requests = [0] * engines
        self.tokens = [0] * engines
        self.failures = [0] * engines
        self._in_a_row = [0] * engines  # failures
        self._passed_over_until = [0.0] * engines
        self._clock = clock
        self._slack, self._most = slack, most_requests
        self._block, self._known_blocks = block, known_blocks
        # The marks of blocks that an engine was given, the least recently used first.
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]

    @classmethod
    def of(cls, engines: int, config: EngineConfig, page_size: int, num_pages: int) -> Self:
        """A balancer for so many engines with these options."""
        queued = config.max_queue
        return cls(
            engines,
            slack=config.max_rows // 2,
            most_requests=None if queued is None else config.max_rows + queued,
            block=page_size,
            known_blocks=num_pages if config.prefix_caching else 0,
        )

    def place(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        requests: int = 1,
        namespace: Hashable = None,
    ) -> Share:
        """The engine for requests of one prompt, which count as its work until ``end``.

        Args:
          new_tokens: most tokens that each request generates.
          requests: samples of the prompt.
          namespace: what else the cached KV depends on, such as a cache salt.
        """
        marks = list(itertools.islice(self._marks(prompt, namespace), self._known_blocks))

        def preference(engine: int) -> tuple[int, ...]:
            known = sum(1 for _ in itertools.takewhile(self._known[engine].__contains__, marks))
            load = self.requests[engine], self.tokens[engine], len(self._known[engine])
            return known, *(-value for value in load)

        chosen = max(self._open(requests), key=preference)
        self._remember(chosen, marks)
        tokens = len(prompt) + requests * new_tokens
        share = Share(chosen, requests, tokens, self.failures[chosen])
        self.requests[chosen] += share.requests
        self.tokens[chosen] += share.tokens
        if self._in_a_row[chosen]:  # this is the one prompt
            self._pass_over(chosen)
        return share

    def end(self, share: Share, works: bool | None = None) -> None:
        """The work has ended.

        Args:
          works: whether the engine did it, or has failed. None: neither, as for work that was
            cancelled or refused.
        """
        engine = share.engine
        self.requests[engine] -= share.requests
        self.tokens[engine] -= share.tokens
        if works is None or share.failures < self.failures[engine]:
            return  # what was given before a failure says nothing of the time after it
        if works:
            self._in_a_row[engine] = 0
            return
        self.failures[engine] += 1
        self._in_a_row[engine] += 1
        self._known[engine].clear()  # an engine that fails begins anew
        self._pass_over(engine)

    def _pass_over(self, engine: int) -> None:
        doublings = min(self._in_a_row[engine] - 1, 30)  # so that no float overflows
        self._passed_over_until[engine] = self._clock() + min(PAUSE * 2**doublings, LONGEST_PAUSE)

    def _trusted(self) -> list[int]:
        """Engines that are not passed over. Never empty."""
        now, failures = self._clock(), self._in_a_row
        until = self._passed_over_until
        engines = range(len(failures))
        trusted = [engine for engine in engines if not failures[engine] or until[engine] <= now]
        return trusted or [engine for engine in engines if failures[engine] == min(failures)]

    def _open(self, requests: int) -> list[int]:
        """Engines that may get so many requests more. Never empty."""
        trusted = self._trusted()
        fewest = min(self.requests[engine] for engine in trusted)
        most = fewest + self._slack
        if self._most is not None:
            most = max(fewest, min(most, self._most - requests))
        return [engine for engine in trusted if self.requests[engine] <= most]

    def _marks(self, prompt: Sequence[int], namespace: Hashable) -> Iterator[int]:
        """A number for each full block, which depends on all tokens up to the block's end."""
        mark = hash(namespace)
        for end in range(self._block, len(prompt) + 1, self._block):
            mark = hash((mark, tuple(prompt[end - self._block : end])))
            yield mark

    def _remember(self, engine: int, marks: Sequence[int]) -> None:
        known = self._known[engine]
        for mark in reversed(marks):  # so that the end of a prompt is forgotten first
            known[mark] = None
            known.move_to_end(mark)
        while len(known) > self._known_blocks:
            known.popitem(last=False)
