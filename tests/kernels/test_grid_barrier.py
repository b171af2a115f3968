"""The barrier of all thread blocks of a launch: its counter, on numbers."""

import numpy as np
import pytest

from pallas_kernels.grid_barrier import counted_since

BLOCKS, LAUNCHES = 5, 3


@pytest.mark.parametrize(("count", "waiting"), [(2, BLOCKS), (3, BLOCKS), (3, 2)])
def test_no_block_leaves_a_barrier_before_all_have_come(count: int, waiting: int):
    """Blocks move in a random order. Of the last barrier ``waiting`` blocks wait, others end."""
    draw, counter = np.random.default_rng(0), 0
    for _ in range(LAUNCHES):
        come = np.zeros(BLOCKS, int)  # barriers to which each block has come
        left = np.zeros(BLOCKS, int)
        while (left < count).any():
            block = draw.choice(np.flatnonzero(left < count))
            number = left[block]
            if come[block] == number:
                counter = 0 if counter >= BLOCKS * count - 1 else counter + 1  # inc.u32
                come[block] += 1
                waits = number < count - 1 or block < waiting
                left[block] += not waits
            elif counted_since(counter, BLOCKS * number) % 2**32 >= BLOCKS:
                assert (come > number).all()
                left[block] += 1
        assert counter == 0
