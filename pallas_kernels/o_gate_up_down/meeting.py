"""The memory in which thread blocks of a launch meet, of o_gate_up_down and of expert_gate_up_down
(see grid_barrier.py).

It lives as long as the programs that use it, is cleared once, and is 0 between two launches. Two
launches that may run at the same time must not share it. Even with two of them neither might end:
each could have multiprocessors that the other one waits for. By default XLA starts the kernels of a
device one after the other, in CUDA graphs, too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.selection import is_hopper

MEETING = ("o_gate_up_down", "expert_gate_up_down")  # operations that need it
SHAPE = (1, 1)  # of one device, one counter


def meeting_shape(beside: Any = None) -> jax.ShapeDtypeStruct:
    """The memory of a device that can run all thread blocks at once."""
    return jax.ShapeDtypeStruct(SHAPE, jnp.int32)


def make_meeting(beside: Array) -> Array | None:
    """A new one on the device of an array; None where thread blocks would wait for others that
    cannot start: a launch has one for each multiprocessor of an H100 SXM, an H100 PCIe has 114."""
    device, *others = beside.devices()
    if others or not is_hopper(device) or device.core_count < MULTIPROCESSORS:
        return None
    return jax.device_put(np.zeros(SHAPE, np.int32), device)
