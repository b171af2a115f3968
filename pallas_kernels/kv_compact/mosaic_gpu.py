"""Compaction on Hopper GPUs: one warpgroup per cache, sequence and KV head."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from pallas_kernels import kernel_axes
from pallas_kernels.mosaic_module_names import fixed_name

CACHES = 16  # per launch: the kernel's parameters hold a 128-byte TMA descriptor for each


def kv_compact_mosaic(
    pages: tuple[Array, ...],  # [P, G, K, D] each
    source: Array,  # [B, A]
    destination: Array,  # [B, A]
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See pallas_kernels.kv_compact.kv_compact; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    moved = []
    for start in range(0, len(pages), CACHES):
        moved += _compact_some(pages[start : start + CACHES], source, destination, interpret)
    return tuple(moved)


# Traced once for all launches with the same number of caches.
@functools.partial(jax.jit, static_argnames=("interpret",))
def _compact_some(
    pages: tuple[Array, ...], source: Array, destination: Array, interpret: Any
) -> list[Array]:
    batch, num_rows = source.shape
    _, kv_heads, page_size, _ = pages[0].shape

    @fixed_name(interpret)
    def kv_compact_kernel(source_ref, destination_ref, *refs):
        *caches, rows, full = refs
        sequence, head = kernel_axes.index("sequence"), kernel_axes.index("kv_head")

        def at(slots: Any, cache: Any, row: Any) -> Any:
            slot = slots[sequence, row]
            return cache.at[slot // page_size, head, slot % page_size]

        for index, cache in enumerate(caches):

            @pl.when(kernel_axes.index("cache") == index)
            def _move(cache=cache):
                @pl.loop(0, num_rows)
                def _read(row):
                    plgpu.copy_gmem_to_smem(at(source_ref, cache, row), rows.at[row], full)

                plgpu.barrier_wait(full)

                @pl.loop(0, num_rows)
                def _write(row):
                    plgpu.copy_smem_to_gmem(rows.at[row], at(destination_ref, cache, row))

                # The shared memory must have been read before another block may reuse it.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        kv_compact_kernel,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((num_rows, pages[0].shape[-1]), pages[0].dtype),
            plgpu.Barrier(num_arrivals=num_rows),
        ],
        grid=(kv_heads, batch, len(pages)),
        grid_names=kernel_axes.names("kv_head", "sequence", "cache"),
        interpret=interpret,
    )
    refs = [jax.new_ref(array) for array in pages]
    kernel(source, destination, *refs)
    return [jax.freeze(ref) for ref in refs]
