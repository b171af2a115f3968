"""Query rows on their way to shared memory, for the kernel in mosaic_gpu.py."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels import kernel_axes
from pallas_kernels.paged_attention.plan import AttentionPlan, Work


def load_queries(plan: AttentionPlan, work: Work, q: Any, tile: Array, refs: Any) -> None:
    """Load the tile's rows [ROWS, D] to shared memory. Rows past its tokens are undefined.

    TMA copies a few rows per token, without a swizzle. They are then stored again in the tiled
    layout that wgmma reads. Operands in registers would occupy them during the whole kernel.
    """
    warpgroup = kernel_axes.index("warpgroup")
    full, rows = refs["q_full"].at[warpgroup], refs["rows"].at[warpgroup]

    @pl.loop(0, plan.tokens)
    def _copy(i):
        token = jnp.minimum(tile * plan.tokens + i, plan.num_tokens - 1)
        plgpu.copy_gmem_to_smem(
            q.at[work.sequence, token, pl.ds(work.kv_head * plan.group, plan.group)],
            rows.at[pl.ds(i * plan.group, plan.group)],
            full,
        )

    plgpu.barrier_wait(full)
    tiled = refs["queries"].at[warpgroup]
    tiled[...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()
