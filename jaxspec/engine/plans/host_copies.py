"""Copies in host memory: of rows that were swapped out, and of what rows keep outside of pages.

The pages of swapped rows are moved a part at a time, by the same two programs for all. Snapshots
hold the states of recurrent layers. The scheduler says which slot is for which, and gives slots up;
see scheduling/snapshots.py.
"""

import functools
import time

import jax
import numpy as np

from jaxspec.cache import ModelState
from jaxspec.decoding import functional
from jaxspec.decoding.functional import EngineParams, SavedRow
from jaxspec.decoding.functional.pipelined import init_stage, save_from_stage
from jaxspec.engine.programs.arguments import empty_state
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Sizes
from jaxspec.scheduling.plan import Snapshot, SwapIn, SwapOut
from jaxspec.scheduling.preemption_costs import PreemptionCosts

MEASURED = 3  # times that a part is moved to see what it costs; the fastest counts


class SwappedRows:
    """What the plans of a scheduler have moved to host memory, by request id."""

    def __init__(self, programs: Programs, costs: PreemptionCosts):
        self.programs, self.costs = programs, costs
        self._parts: dict[str, list[SavedRow]] = {}
        self._leaving: list[str] = []  # their parts are still in device memory, too

    @property
    def bytes(self) -> int:
        """In host memory now."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._parts))

    def save(self, out: SwapOut) -> None:
        """Start copying a row to host memory. The first time it is measured what that costs."""
        if self.costs.swap_part is None:
            measure_swapping(self.programs, self.costs, out.row)
        size, request_id = self.programs.sizes.part_pages, out.sequence.request_id
        self._parts[request_id] = [
            self.programs.save(out.row, out.pages[first : first + size])
            for first in range(0, len(out.pages), size)
        ]
        self._leaving.append(request_id)

    def finish_saving(self) -> None:
        """Wait for what was started, and give the device's copies up."""
        for request_id in self._leaving:
            if request_id in self._parts:
                self._parts[request_id] = jax.device_get(self._parts[request_id])
        self._leaving.clear()

    def restore(self, back: SwapIn) -> None:
        """Put a row back, with other pages."""
        size = self.programs.sizes.part_pages
        row, table = back.sequence.row, back.sequence.pages
        parts = self._parts.pop(back.sequence.request_id)
        for saved, first in zip(parts, range(0, back.restored, size), strict=False):
            pages = table[first : min(first + size, back.restored)]
            self.programs.restore(saved, row, pages, table)

    def drop(self, request_id: str) -> None:
        self._parts.pop(request_id, None)


def measure_swapping(programs: Programs, costs: PreemptionCosts, row: int) -> None:
    """Time moving a part to host memory and back. The row stays as it is, and so do all pages but
    the null page."""
    pages, table = range(1, 1 + programs.sizes.part_pages), programs.tables[row].tolist()

    def move() -> None:
        saved = jax.device_get(programs.save(row, pages))
        programs.restore(saved, row, (), table)
        jax.block_until_ready(programs.state)

    move()  # compiles the programs
    timed = []
    for _ in range(MEASURED):
        started = time.perf_counter()
        move()
        timed.append(time.perf_counter() - started)
    costs.add_swap(1, min(timed))


def part_bytes(params: EngineParams, sizes: Sizes) -> int:
    """Bytes of a part in host memory. Nothing is allocated."""
    last = params.last_stage
    state = jax.eval_shape(lambda: empty_state(last, sizes))
    row, pages = np.zeros(1, np.int32), np.zeros(sizes.part_pages, np.int32)
    saved = [jax.eval_shape(functional.save_row, last, state, row, pages)[1]]
    for stage in params.stages:
        size = sizes.num_pages, sizes.page_size, sizes.num_rows
        states = jax.eval_shape(functools.partial(init_stage, stage, *size))
        saved.append(jax.eval_shape(save_from_stage, stage, states, row, pages)[1])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))


class RowSnapshots:
    """States of recurrent layers that the plans of a scheduler have copied, by slot."""

    def __init__(self, programs: Programs):
        self.programs = programs
        self._saved: dict[int, ModelState] = {}
        self._leaving: set[int] = set()  # their copies are still in device memory

    @property
    def bytes(self) -> int:
        """In use, those of slots included that were given up and not used again."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._saved))

    def take(self, step: Snapshot) -> None:
        """Start copying a row's states to host memory."""
        self._saved[step.slot] = self.programs.take_states(step.row)
        self._leaving.add(step.slot)

    def finish(self) -> None:
        """Wait for what was started, and give the device's copies up."""
        for slot in self._leaving:
            self._saved[slot] = jax.device_get(self._saved[slot])
        self._leaving.clear()

    def put(self, slot: int, row: int) -> None:
        """Give a row the states of a slot."""
        self.programs.put_states(self._saved[slot], row)


def snapshot_bytes(params: EngineParams, sizes: Sizes) -> int:
    """Bytes of a snapshot. Nothing is allocated."""
    state = jax.eval_shape(lambda: empty_state(params, sizes))
    row = np.zeros(1, np.int32)
    saved = jax.eval_shape(functional.take_states, params, state, row)[1]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))
