"""Calls of programs, and what they emitted."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decoding.state import Emitted


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
    return [
        group[0]
        if len(group) == 1
        else group[0]._replace(emitted=_joined([call.emitted for call in group]))
        for group in groups
    ]


def _continues(call: LaunchedCall, after: LaunchedCall) -> bool:
    are_rounds = call.emitted.num_rounds > 0 and after.emitted.num_rounds > 0
    return bool(are_rounds) and np.array_equal(call.rows, after.rows)


def _joined(parts: Sequence[Emitted]) -> Emitted:
    """The rounds of all parts in order; what has no axis of rounds is the last part's."""
    *_, last = parts
    rounds: dict[str, Any] = {"num_rounds": sum(int(part.num_rounds) for part in parts)}
    for field in dataclasses.fields(Emitted):  # pyright: ignore[reportArgumentType]
        if (
            field.metadata.get("axes", ())[:1] == ("rounds",)
            and getattr(last, field.name) is not None
        ):
            rounds[field.name] = np.concatenate([getattr(part, field.name) for part in parts])
    if last.trees is not None:
        trees = [part.trees for part in parts]
        rounds["trees"] = jax.tree.map(lambda *arrays: np.concatenate(arrays), *trees)
    return last.replace(**rounds)


def to_host[T](arrays: T) -> T:
    """A pytree of arrays whose copies are on their way to the host."""
    for leaf in jax.tree.leaves(arrays):
        leaf.copy_to_host_async()
    return arrays
