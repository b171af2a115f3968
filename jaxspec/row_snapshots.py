"""Copies in host memory of what rows keep outside of pages: the states of recurrent layers.

The scheduler says which slot is for which, and gives slots up; see scheduling/snapshots.py.
"""

import jax
import numpy as np

from jaxspec import functional
from jaxspec.cache import ModelState
from jaxspec.functional import EngineParams
from jaxspec.new_rows import empty_state
from jaxspec.program_sizes import Sizes
from jaxspec.programs import Programs
from jaxspec.scheduling.plan import Snapshot


class RowSnapshots:
    """What the plans of a scheduler have copied, by slot."""

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
    """Bytes of one. Nothing is allocated."""
    state = jax.eval_shape(lambda: empty_state(params, sizes))
    row = np.zeros(1, np.int32)
    saved = jax.eval_shape(functional.take_states, params, state, row)[1]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))
