"""What chosen experts in blocks of 8-bit floats make of up to 8 rows, in one launch: gate, up and
down."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.expert_gate_up_down.plan import (
    BLOCK_INPUTS,
    OUTPUTS,
    ROWS,
    WARPGROUPS,
    WARPS,
    block_inputs,
)
from pallas_kernels.expert_slots import SlotProducts, Slots
from pallas_kernels.packed_expert_product.reference import packed_expert_product_reference
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.selection import Implementation, kernel_module

MOST_HIDDEN = 5120  # of which a thread block keeps x in shared memory


@jax.named_scope("expert_gate_up_down")
def expert_gate_up_down(
    x: Array,
    experts: Array,
    slots: Slots,
    gate_up: PackedExperts,
    down: PackedExperts,
    meeting: Array | None = None,
    implementation: Implementation = "reference",
) -> SlotProducts:
    """Hidden units of each chosen expert, times its ``down``. Not weighted, not summed.

    Args:
      x: bfloat16 [N, H].
      experts: int32 [N, k] those that each row chose, E for none.
      slots: of ``experts``, with shared rows.
      gate_up: two parts of F outputs.
      down: one part of H outputs.
      meeting: where thread blocks of the kernel meet, see o_gate_up_down/meeting.py; without it the
        reference runs.
      implementation: see selection.Implementation; the Hopper kernel takes what ``misfit`` says.

    Returns float32 products of all pairs that have an expert. Hidden units are rounded to bfloat16.
    What a row gets does not depend on other rows. The kernel's weights are exact, where the
    reference rounds them to bfloat16.
    """
    problem = misfit(x, slots, gate_up, down)
    if meeting is None:
        problem = problem or "no place to meet"
    mosaic = kernel_module("expert_gate_up_down", implementation, problem)
    if mosaic is None:
        products = packed_expert_product_reference(x, experts, gate_up, down, clamp=None)
        return SlotProducts.in_order(products)
    return mosaic.expert_gate_up_down_mosaic(x, slots, gate_up, down, meeting)


def misfit(x: Array, slots: Slots, gate_up: PackedExperts, down: PackedExperts) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    return ", ".join(_problems(x, slots, gate_up, down)) or None


def _problems(x: Array, slots: Slots, gate_up: PackedExperts, down: PackedExperts) -> Iterator[str]:
    rows, hidden = x.shape
    if rows > ROWS or slots.rows is not None:
        yield f"{rows} rows: at most {ROWS}, which all slots share"
    if x.dtype != jnp.bfloat16:
        yield f"rows of {x.dtype}: they must be bfloat16"
    if any(weights.code != "e4m3" for weights in (gate_up, down)):
        yield "weights of other than 8-bit floats"
    if any(weights.factor is not None for weights in (gate_up, down)):
        yield "a factor for each output"
    size, (outputs, inputs) = block_inputs(hidden, gate_up.width), gate_up.block
    if size is None or hidden > MOST_HIDDEN:
        least = BLOCK_INPUTS[-1]
        yield (
            f"{hidden} inputs and {gate_up.width} units: multiples of {WARPGROUPS * least}, up to "
            f"{MOST_HIDDEN}, and of {least}"
        )
    elif outputs % OUTPUTS or inputs % (size // WARPS) or down.block != gate_up.block:
        yield (
            f"blocks of {gate_up.block} and {down.block} with a scale: equal ones, of multiples of "
            f"{OUTPUTS} outputs and {size // WARPS} inputs"
        )
