"""Meetings of a cluster's thread blocks on Hopper GPUs.

All threads of all blocks of the cluster take part. What a thread wrote to shared memory before it
arrived, every thread sees that waited. jax's ClusterBarrier promises that within a block only: its
arrivals name no scope.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


@plgpu.inline_mgpu()
def arrive(_):
    """Say that this thread is here."""
    nvvm.cluster_arrive(aligned=True)


@plgpu.inline_mgpu()
def wait(_):
    """Wait until all threads have arrived."""
    nvvm.cluster_wait(aligned=True)
