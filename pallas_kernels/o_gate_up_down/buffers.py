"""The arrays of a launch of o_gate_up_down: what it reads, returns, and has in shared memory."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.o_gate_up_down.plan import (
    BLOCK,
    BUFFERS,
    GROUP,
    ROWS,
    TILE,
    TILES,
    WARPS,
    PhaseName,
    Plan,
)
from pallas_kernels.o_gate_up_down.products import SUMS
from pallas_kernels.o_gate_up_down.rows import NORM_PART
from pallas_kernels.o_gate_up_down.weights import PackedWeights

Refs = dict[str, Any]
Weights = dict[PhaseName, PackedWeights]
RESULTS: dict[PhaseName, str] = {"o": "total", "gate_up": "units", "down": "partials"}


def viewed(plan: Plan, name: PhaseName, weights: PackedWeights) -> Refs:
    """Arrays of which a job's weights are a part with two tiles in front: values [2, F, K] and
    factors [n, 2, F] of gate and up; else [V / TILE, TILE, K] and [n, V / TILE, TILE]. Scales of
    whole outputs are [V]."""
    outputs = (TILES, -1) if name == "gate_up" else (-1, TILE)
    views = {f"{name}.values": weights.values.reshape(*outputs, weights.values.shape[-1])}
    if plan.form.scales_sums:
        return views | {f"{name}.scale": weights.scale.reshape(-1)}
    for factor in plan.form.factors:
        array = getattr(weights, factor)
        if array is not None:
            views[f"{name}.{factor}"] = array.reshape(len(array), *outputs)
    return views


def results_of(plan: Plan, weights: Weights) -> Refs:
    """What a launch of these phases returns."""
    results = {RESULTS[name]: _result(plan, name) for name in weights}
    if plan.form.scales_sums and "gate_up" in weights:
        results["largest_units"] = jax.ShapeDtypeStruct((plan.tuning.blocks, ROWS), jnp.float32)
    return results


def _result(plan: Plan, name: PhaseName) -> jax.ShapeDtypeStruct:
    if name == "down":
        shape = plan.num_splits, plan.rows, plan.hidden
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    if name == "o":
        return _rows_of(plan, plan.hidden)
    # Where units are copied, rows that nobody writes are read as they are: the copy engine takes
    # half a microsecond longer for rows outside.
    rows = plan.rows if plan.form.rounds else ROWS
    return jax.ShapeDtypeStruct((rows, plan.units), jnp.bfloat16)


def _rows_of(plan: Plan, width: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((plan.rows, width), jnp.bfloat16)


def scratch_of(plan: Plan, weights: Weights) -> Refs:
    """The ring of weights, x, the parts of jobs, and barriers."""
    stages, warpgroups, form = plan.stages, plan.tuning.warpgroups, plan.form
    values, rows = (stages, TILES, TILE, BLOCK), (ROWS, plan.depth)
    sums = warpgroups, plan.turns * (1 + form.rounds), WARPS
    scratch: Refs = {
        "values": plgpu.SMEM(values, form.dtype, transforms=form.transforms),
        "rows": plgpu.SMEM(rows, form.row_dtype, transforms=form.row_transforms),
        "sums": plgpu.SMEM(sums, jnp.float32),
        "parts": plgpu.SMEM((BUFFERS, warpgroups, *SUMS), jnp.float32),
        "free": plgpu.Barrier(num_barriers=stages),
        "rows_copied": plgpu.Barrier(),
        "rows_put": plgpu.Barrier(num_arrivals=warpgroups),
        "met": plgpu.Barrier(),
        "done": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=BUFFERS),
        "stored": plgpu.Barrier(num_barriers=BUFFERS),
    }
    if "gate_up" in plan.names:
        scratch["norm_weight"] = plgpu.SMEM((plan.hidden // NORM_PART, NORM_PART), jnp.bfloat16)
        scratch["norm_copied"] = plgpu.Barrier()
    if form.rounds:
        of_groups = (plan.depth // GROUP,) if form.by_group else ()
        scratch["row_scales"] = plgpu.SMEM((ROWS, *of_groups), jnp.float32)
        scratch["largest"] = plgpu.SMEM((ROWS,), jnp.float32)
    copies = 1
    for factor in form.factors:
        of_all = [getattr(packed, factor) for packed in weights.values()]
        if of_all and of_all[0] is not None:
            shape = stages, WARPS, TILES, TILE
            scratch[factor] = plgpu.SMEM(shape, of_all[0].dtype)
            copies += 1
    scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    return scratch
