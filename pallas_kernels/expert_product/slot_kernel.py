"""What the Hopper kernels of experts share: a CTA for each slot and tile of outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.activations import units_of
from pallas_kernels.expert_product.plan import SlotPlan

OUTPUT_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # one value for each output of a warpgroup


def launched(
    plan: SlotPlan,
    kernel: Callable[..., Any],
    scratch: Mapping[str, Any],
    tiles: int,
    warpgroups: int,
    interpret: Any,
) -> Callable[..., Array]:
    """The launch of a kernel's body: [lanes of all slots, width], by so many CTAs for a slot."""
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.slots * plan.lanes, plan.width), plan.dtype),
        scratch_types=scratch,
        grid=(plan.slots, tiles),
        grid_names=kernel_axes.names("slot", "tile"),
        num_threads=warpgroups,
        thread_name=kernel_axes.name("warpgroup"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )


def lanes_of(plan: SlotPlan, slot: Array) -> Any:
    """The rows of x that are a slot's lanes.

    Shared lanes may be more than there are rows: a start that is not known keeps the slice from
    being checked, and the copy engine writes zeros for rows that are not there.
    """
    return pl.ds(slot * (0 if plan.shared else plan.lanes), plan.lanes)


def result_of(plan: SlotPlan, sums: Sequence[Array], biases: Sequence[Any], first: Array) -> Array:
    """Hidden units of gate and up, or the sums themselves: [OUTPUTS, lanes]."""
    if plan.parts == 1:
        return sums[0]
    for bias in biases:
        sums = [
            total + b for total, b in zip(sums, by_output(plan, bias, sums, first), strict=True)
        ]
    gate, up = sums
    return units_of(gate, up, plan.clamp, _sigmoid)


def by_output(plan: SlotPlan, values: Any, sums: Sequence[Array], first: Array) -> list[Array]:
    """What an expert has for each output, from ``first`` on, beside sums [OUTPUTS, lanes] of each
    part, in float32."""
    loads = [values.at[part, pl.ds(first, len(sums[0]))] for part in range(plan.parts)]
    loaded = [plgpu.load(ref, layout=OUTPUT_LAYOUT, optimized=False) for ref in loads]
    return [lax.broadcast_in_dim(x.astype(jnp.float32), sums[0].shape, [0]) for x in loaded]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))
