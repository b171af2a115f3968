"""What chosen experts of 4 or 8 bits make of a few rows: their SwiGLU MLPs, of which only the
chosen are read, as they are stored."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.activations import Gating
from pallas_kernels.expert_product import LEAST_UNITS
from pallas_kernels.expert_slots import MOST_ROWS, SlotProducts, Slots, make_slots
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.packed_expert_product.reference import packed_expert_product_reference
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.selection import Implementation, kernel_module

LINE = 128  # inputs of a block of e4m3 in the kernel, at most
LEAST_GROUP = {"e8m0": 32, "e5m3": 16}  # inputs that share a scale, by its code
MOST_OF_BYTES = 32  # inputs that share a byte: two of each output are copied at once, or more


@jax.named_scope("packed_expert_product")
def packed_expert_product(
    x: Array,
    experts: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    bias: Array | None = None,
    *,
    clamp: Gating | None = None,
    implementation: Implementation = "reference",
) -> Array:
    """Hidden units of each chosen expert, times its ``down``. Not weighted, not summed.

    Args:
      x: [N, H].
      experts: int32 [N, k] those that each row chose, E for none.
      gate_up: two parts of F outputs.
      down: one part of H outputs.
      bias: of gate and up [E, 2, F].
      clamp: of the hidden units; None: SwiGLU.
      implementation: see selection.Implementation; for the Hopper kernel see ``misfit``.

    Returns float32 [N, k, H]; anything for pairs without an expert. Hidden units are rounded to
    x's dtype. What a row gets does not depend on other rows. The kernel's weights are exact, where
    the reference rounds them to x's dtype.
    """
    problem = misfit(x, gate_up, down, bias)
    mosaic = kernel_module("packed_expert_product", implementation, problem)
    reference = functools.partial(packed_expert_product_reference, clamp=clamp)
    if mosaic is None:
        return reference(x, experts, gate_up, down, bias)
    kernel = functools.partial(mosaic.packed_expert_product_mosaic, clamp=clamp)
    return with_reference_gradient(kernel, reference)(x, experts, gate_up, down, bias)


def packed_expert_slots(
    x: Array,
    experts: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    bias: Array | None = None,
    slots: Slots | None = None,
    *,
    clamp: Gating | None = None,
    implementation: Implementation = "reference",
) -> SlotProducts:
    """``packed_expert_product``, whose products stay where the kernel leaves them: it has no
    gradient. ``slots``: of ``experts``, if they are known already."""
    problem = misfit(x, gate_up, down, bias)
    mosaic = kernel_module("packed_expert_product", implementation, problem)
    if mosaic is not None:
        slots = slots or make_slots(experts, gate_up.num_experts)
        return mosaic.packed_expert_slots_mosaic(x, slots, gate_up, down, bias, clamp=clamp)
    return SlotProducts.in_order(
        packed_expert_product_reference(x, experts, gate_up, down, bias, clamp=clamp)
    )


def misfit(
    x: Array, gate_up: PackedExperts, down: PackedExperts, bias: Array | None = None
) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    if any(array.dtype != jnp.bfloat16 for array in (x, *([] if bias is None else [bias]))):
        return f"rows of {x.dtype}: they and biases must be bfloat16"
    if len(x) > MOST_ROWS:
        return f"{len(x)} rows: at most {MOST_ROWS}"
    return weights_misfit(gate_up) or weights_misfit(down)


def weights_misfit(weights: PackedExperts) -> str | None:
    """Why the kernel cannot take these weights, None if it can."""
    depth, width, (outputs, inputs) = weights.depth, weights.width, weights.block
    if depth % LEAST_UNITS or width % LEAST_UNITS:
        return f"{depth} inputs and {width} outputs: multiples of {LEAST_UNITS}"
    if outputs > 1:
        if outputs % LEAST_UNITS or inputs % LINE:
            return f"blocks of {outputs} outputs and {inputs} inputs: multiples of 64 and 128"
        return None
    least = LEAST_GROUP[weights.scale_code]
    if inputs % least or depth % inputs or (inputs != depth and inputs.bit_count() > 1):
        return (
            f"groups of {inputs} of {depth} inputs: all inputs, or a power of two from {least} on "
            "that divides them"
        )
    if (weights.code == "int4") == (weights.scale.dtype == jnp.uint8):
        wanted = "floats" if weights.code == "int4" else "bytes (uint8)"
        return f"{weights.code} with scales of {weights.scale.dtype}: {wanted}"
    if weights.zero is not None and weights.code != "int4":
        return f"zeros of {weights.code}: of integers only"
    if weights.scale.dtype == jnp.uint8 and inputs > MOST_OF_BYTES:
        return f"bytes as scales of {inputs} inputs: of at most {MOST_OF_BYTES}"
    return None
