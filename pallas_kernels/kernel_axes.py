"""Names of the axes of a kernel's grid, cluster and threads.

Inside ``shard_map`` jax looks a name up among the axes of the device mesh first. A grid axis called
"sequence" would be read as the device's index along a mesh axis of that name, without an error, and
every thread block would compute the same sequence. So axes of kernels have a prefix that no mesh
axis should have.
"""

from jax import Array, lax

PREFIX = "kernel_"


def names(*axes: str) -> tuple[str, ...]:
    """The full names of axes, for ``grid_names`` and ``cluster_names``."""
    return tuple(PREFIX + axis for axis in axes)


def name(axis: str) -> str:
    """The full name of an axis, for ``thread_name``."""
    return PREFIX + axis


def index(axis: str) -> Array:
    """This thread block's, or this thread's, index along an axis of the kernel: int32 []."""
    return lax.axis_index(PREFIX + axis)
