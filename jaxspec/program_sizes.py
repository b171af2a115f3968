"""Sizes that programs are compiled for, and which compiled program serves a call.

Sizes are powers of two, so there are few. A call runs in the smallest program that is ready and
holds it; if there is none, in one that is compiled for the load.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.config.speculation import TreeShape

MOST_WASTE = 4  # a prompt is read by a program of at most this many times its size


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of an engine's state, and of the largest call.

    Attributes:
      num_pages: null pages included.
      max_stops: most stop tokens of a row.
      max_chunk: most prompt tokens of a row in a call.
      max_rounds: most rounds of a call.
    """

    num_rows: int
    max_length: int
    page_size: int
    num_pages: int
    max_stops: int
    max_chunk: int
    max_rounds: int


@dataclasses.dataclass
class Load:
    """What was asked for since the engine was last idle; programs are compiled for that size.

    Attributes:
      rows: most requests at once.
      tokens: of the longest of them, prompt included.
      greedy: none of them samples.
    """

    rows: int = 0
    tokens: int = 0
    greedy: bool = True


class ReadKey(NamedTuple):
    """Sizes of a program that reads prompts; ``rows`` of each shard."""

    rows: int
    columns: int
    width: int
    greedy: bool

    def holds(self, other: "ReadKey") -> bool:
        return (
            self.rows >= other.rows
            and self.columns >= other.columns
            and self.width >= other.width
            and (other.greedy or not self.greedy)
        )

    @property
    def cost(self) -> int:
        return self.rows * self.width


class RoundsKey(NamedTuple):
    """Sizes of a program of rounds; ``rows`` of each shard."""

    rows: int
    columns: int
    shape: TreeShape
    greedy: bool

    def holds(self, other: "RoundsKey") -> bool:
        return (
            self.rows >= other.rows
            and self.columns >= other.columns
            and self.shape == other.shape
            and (other.greedy or not self.greedy)
        )

    @property
    def cost(self) -> int:
        return self.rows * self.columns


def choose_reading(
    ready: Iterable[object], wanted: ReadKey, target: ReadKey, *, sealed: bool
) -> ReadKey:
    """The program that reads: one of those ready, or ``target``, which is then compiled."""
    fitting = [key for key in ready if isinstance(key, ReadKey) and key.holds(wanted)]
    if not sealed:
        fitting = [key for key in fitting if key.cost <= MOST_WASTE * target.cost]
        fitting = [key for key in fitting if key.greedy or not target.greedy]
    return min(fitting, key=lambda key: (key.cost, key.columns, not key.greedy), default=target)


def choose_rounds(
    ready: Iterable[object], wanted: RoundsKey, target: RoundsKey, *, sealed: bool
) -> RoundsKey:
    """The program of rounds: one of those ready, or ``target``, which is then compiled."""
    fitting = [key for key in ready if isinstance(key, RoundsKey) and key.holds(wanted)]
    if not sealed:
        fitting = [key for key in fitting if key.cost <= target.cost]
        fitting = [key for key in fitting if key.greedy or not target.greedy]
    return min(fitting, key=lambda key: (key.cost, not key.greedy), default=target)


def power_of_two(number: int) -> int:
    """The smallest that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
