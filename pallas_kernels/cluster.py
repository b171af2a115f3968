"""Barriers for all threads of a thread block cluster on Hopper GPUs.

Every thread of every block of the cluster must take part. After it has waited, a thread sees all
that the others wrote to shared memory before they arrived. jax's ClusterBarrier guarantees this
only within a block, because its arrivals name no memory scope.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


def arrive() -> None:
    """Signal that this thread has reached the barrier."""
    _emit(nvvm.cluster_arrive)


def wait() -> None:
    """Wait until all threads have arrived."""
    _emit(nvvm.cluster_wait)


def sync() -> None:
    """Arrive, then wait for all threads."""
    arrive()
    wait()


def _emit(instruction: Callable[..., Any]) -> None:
    def emit(_: Any) -> None:
        instruction(aligned=True)

    inlined: Any = plgpu.inline_mgpu()(emit)
    inlined()
