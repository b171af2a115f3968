"""The arrays of a launch of expert_gate_up_down: what it reads, its results, its shared memory."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.expert_gate_up_down.plan import (
    BUFFERS,
    LOGITS_STEP,
    ROWS,
    THREADS,
    TILE,
    WARPGROUPS,
    Phase,
    Plan,
)
from pallas_kernels.expert_gate_up_down.products import (
    SPAN,
    SUMS,
    WEIGHT_TRANSFORMS,
    X_TRANSFORMS,
)
from pallas_kernels.packed_experts import PackedExperts

HALF = TILE // 2  # rows of weights that lie side by side in memory
LISTS = "filled", "expert", "count"  # of slots that have an expert of a kind; see list_filled


def viewed(phase: Phase, weights: PackedExperts) -> dict[str, Any]:
    """Arrays of which a block's weights are a part with two rows in front: values [n, HALF, inputs]
    of down, [E * 2, F, inputs] of gate and up; scales [n]."""
    values = weights.values
    if phase.name == "gate_up":
        values = values.reshape(-1, *values.shape[2:])
    else:
        values = values.reshape(-1, HALF, values.shape[-1])
    return {f"{phase.key}.values": values, f"{phase.key}.scale": weights.scale.reshape(-1)}


def results(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """The results of a launch, by name: of the router's product, of choices, and of each phase."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
    if plan.router is not None and plan.routes:
        width = -(-plan.router.logits // LOGITS_STEP) * LOGITS_STEP
        shapes["logits"] = (plan.rows, width), jnp.float32
    if plan.router is not None and "gate_up" in plan.names:
        choices = plan.rows, plan.router.count
        shapes |= {"weights": (choices, jnp.float32), "places": (choices, jnp.int32)}
    if "gate_up" in plan.names:
        shapes["units"] = (plan.slots * plan.units // SPAN, ROWS, SPAN), jnp.bfloat16
    if "down" in plan.names:
        shapes["products"] = (plan.slots * ROWS, plan.hidden), jnp.float32
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def scratch_of(plan: Plan) -> dict[str, Any]:
    """The ring of weights, x, the parts of jobs, the lists of slots, and barriers."""
    ring = plan.stages * WARPGROUPS
    lists = {
        f"{kind.name}.{name}": plgpu.SMEM((plan.slots if name != "count" else 1,), jnp.int32)
        for kind in plan.kinds
        for name in LISTS
    }
    if any(kind.stored.has_bytes for kind in plan.kinds):
        lists["nowhere"] = plgpu.SMEM((THREADS,), jnp.int32)
    values = ring, 2, HALF, plan.row
    return {
        "values": plgpu.SMEM(values, jnp.uint8, transforms=WEIGHT_TRANSFORMS),
        "rows": plgpu.SMEM((ROWS, plan.hidden), jnp.bfloat16, transforms=X_TRANSFORMS),
        "parts": plgpu.SMEM((BUFFERS, WARPGROUPS, *SUMS), jnp.float32),
        **lists,
        "pairs": plgpu.SMEM((plan.slots,), jnp.int32),
        "of_slots": plgpu.SMEM((plan.slots,), jnp.int32),
        "full": plgpu.Barrier(num_barriers=ring),
        "free": plgpu.Barrier(num_barriers=ring),
        "rows_copied": plgpu.Barrier(),
        "routed": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "listed": plgpu.Barrier(),
        "met": plgpu.Barrier(),
        "done": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=BUFFERS),
        "stored": plgpu.Barrier(num_barriers=BUFFERS),
    }
