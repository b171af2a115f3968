"""What chosen experts make of a few rows: their SwiGLU MLPs, of which only the chosen are read."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.activations import Gating
from pallas_kernels.expert_product.reference import expert_product_reference
from pallas_kernels.expert_slots import MOST_ROWS, SlotProducts, Slots, make_slots
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.selection import Implementation, kernel_module

LEAST_UNITS = 64  # and inputs and outputs: they are multiples of it


@jax.named_scope("expert_product")
def expert_product(
    x: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    bias: Array | None = None,
    *,
    clamp: Gating | None = None,
    implementation: Implementation = "reference",
) -> Array:
    """Hidden units of each chosen expert, times its ``down``. Not weighted, not summed.

    Args:
      x: [N, H].
      experts: int32 [N, k] those that each row chose, E for none.
      gate_up: [E, H, 2, F].
      down: [E, F, H].
      bias: of gate and up [E, 2, F].
      clamp: of the hidden units; None: SwiGLU.
      implementation: see selection.Implementation; the Hopper kernel takes all bfloat16, at most
        4096 rows, H and F multiples of 64.

    Returns float32 [N, k, H]; anything for pairs without an expert. Hidden units are rounded to
    x's dtype. What a row gets does not depend on other rows.
    """
    problem = misfit(x, gate_up, down, bias)
    mosaic = kernel_module("expert_product", implementation, problem)
    reference = functools.partial(expert_product_reference, clamp=clamp)
    if mosaic is None:
        return reference(x, experts, gate_up, down, bias)
    kernel = functools.partial(mosaic.expert_product_mosaic, clamp=clamp)
    return with_reference_gradient(kernel, reference)(x, experts, gate_up, down, bias)


def expert_slots(
    x: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    bias: Array | None = None,
    slots: Slots | None = None,
    *,
    clamp: Gating | None = None,
    implementation: Implementation = "reference",
) -> SlotProducts:
    """``expert_product``, whose products stay where the kernel leaves them: it has no gradient.

    ``slots``: of ``experts``, if they are known already.
    """
    problem = misfit(x, gate_up, down, bias)
    mosaic = kernel_module("expert_product", implementation, problem)
    if mosaic is not None:
        slots = slots or make_slots(experts, len(gate_up))
        return mosaic.expert_slots_mosaic(x, slots, gate_up, down, bias, clamp=clamp)
    return SlotProducts.in_order(
        expert_product_reference(x, experts, gate_up, down, bias, clamp=clamp)
    )


def misfit(x: Array, gate_up: Array, down: Array, bias: Array | None = None) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    arrays = [x, gate_up, down, *([] if bias is None else [bias])]
    if any(array.dtype != jnp.bfloat16 for array in arrays):
        return f"{', '.join(str(array.dtype) for array in arrays)}: all must be bfloat16"
    (rows, hidden), units = x.shape, down.shape[1]
    if rows > MOST_ROWS:
        return f"{rows} rows: at most {MOST_ROWS}"
    if hidden % LEAST_UNITS or units % LEAST_UNITS:
        return f"{hidden} inputs and {units} hidden units: multiples of {LEAST_UNITS}"
    return None
