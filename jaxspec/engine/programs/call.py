"""Calls of programs, and what they emitted."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.decoding.state import Emitted, concatenated


class LaunchedCall(NamedTuple):
    """A call of a program, and what it emits.

    Attributes:
      rows: int32 [B], the rows that it ran on; those past the last row are padding.
      launched: when its launch returned, by time.perf_counter.
    """

    rows: np.ndarray
    emitted: Emitted
    launched: float

    @classmethod
    def now(cls, rows: np.ndarray, emitted: Emitted) -> "LaunchedCall":
        """The call of a program that was just launched."""
        return cls(rows, emitted, time.perf_counter())


def joined(calls: Sequence[LaunchedCall]) -> list[LaunchedCall]:
    """The calls in order, with rounds of the same rows that follow each other joined to one call.

    They have been read from the device.
    """
    groups: list[list[LaunchedCall]] = []
    for call in calls:
        if groups and _continues(groups[-1][-1], call):
            groups[-1].append(call)
        else:
            groups.append([call])
    return [_joined_rounds(group) if len(group) > 1 else group[0] for group in groups]


def _continues(call: LaunchedCall, after: LaunchedCall) -> bool:
    are_rounds = call.emitted.num_rounds > 0 and after.emitted.num_rounds > 0
    return bool(are_rounds) and np.array_equal(call.rows, after.rows)


def _joined_rounds(calls: Sequence[LaunchedCall]) -> LaunchedCall:
    parts = [call.emitted for call in calls]
    num_rounds = sum(int(part.num_rounds) for part in parts)
    emitted = concatenated(parts, "rounds", np.concatenate).replace(num_rounds=num_rounds)
    return calls[0]._replace(emitted=emitted)


def to_host[T](arrays: T) -> T:
    """A pytree of arrays whose copies are on their way to the host."""
    for leaf in jax.tree.leaves(arrays):
        leaf.copy_to_host_async()
    return arrays
