"""Products of rows with weights of 4-bit floats on Hopper GPUs.

The kernel is packed_expert_product's, with a CTA for every tile of outputs and up to 64 rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.expert_slots import LEAST_LANES
from pallas_kernels.packed_expert_product.mosaic_gpu import plan_of, slot_product
from pallas_kernels.packed_expert_product.tuning import PackedExpertTuning
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.packed_float_product.tuning import lanes_for, packed_float_tuning


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("dtype", "config", "interpret"))
def packed_float_product_mosaic(
    x: Array,  # [M, K]
    weights: PackedExperts,
    *,
    dtype: jnp.dtype,
    config: PackedExpertTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.packed_float_product.packed_float_product; only for what ``misfit``
    accepts. Every slot has the single expert, and so many rows as its lanes.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    rows = len(x)
    lanes = lanes_for(rows)
    slots = -(-rows // lanes)
    shared = rows <= LEAST_LANES  # missing rows are not read; more are copied in whole tiles
    plan = plan_of(
        weights,
        slots,
        lanes,
        shared=shared,
        clamp=None,
        config=config or packed_float_tuning(slots, lanes, weights.width),
        dtype=dtype,
        interpreted=interpret is not None,
    )
    if not shared:
        x = jnp.pad(x, ((0, slots * lanes - rows), (0, 0)))
    expert_of_slot = jnp.zeros(slots, jnp.int32)
    return slot_product(plan, x, expert_of_slot, weights, (), interpret)[:rows]
