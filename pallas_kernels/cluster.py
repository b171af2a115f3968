"""Meetings of a cluster's thread blocks on Hopper GPUs.

All threads of all blocks of the cluster take part. What a thread wrote to shared memory before it
arrived, every thread sees that waited. jax's ClusterBarrier promises that within a block only: its
arrivals name no scope.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


def arrive() -> None:
    """Say that this thread is here."""
    _emit(nvvm.cluster_arrive)


def wait() -> None:
    """Wait until all threads have arrived."""
    _emit(nvvm.cluster_wait)


def meet() -> None:
    """Arrive, and wait for all."""
    arrive()
    wait()


def _emit(instruction: Callable[..., Any]) -> None:
    def emit(_: Any) -> None:
        instruction(aligned=True)

    inlined: Any = plgpu.inline_mgpu()(emit)
    inlined()
