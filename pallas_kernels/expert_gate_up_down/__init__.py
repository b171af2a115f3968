"""What chosen experts of 8-bit or 4-bit floats make of up to 8 rows, in one launch: gate, up and
down, and if wanted the choice before them."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.expert_gate_up_down.plan import (
    GROUP,
    LOGITS_STEP,
    OUTPUTS,
    PART,
    ROWS,
    WARPGROUPS,
    WARPS,
    Stored,
)
from pallas_kernels.expert_gate_up_down.weights import ExpertWeights, Router
from pallas_kernels.expert_slots import SlotProducts, Slots
from pallas_kernels.packed_expert_product.reference import packed_expert_product_reference
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.products import einsum_f32
from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.shared_memory import LINE
from pallas_kernels.top_k.routes import (
    MOST_CHOSEN,
    RouteRule,
    SharedGate,
    expert_routes_reference,
)

MOST_HIDDEN = 5120  # of which a thread block keeps x in shared memory
MOST_EXPERTS = 512  # to choose among: a lane has 16 logits
MOST_PAIRS = 128  # of a row and an expert that it chose: a thread has each
# Most rows of MXFP4 with which a round is faster than with two launches: 2 and 8 were timed on an
# H200, and those of 8 took 9 % longer. Without the choice 2 rows took longer, too.
FASTER_ROWS_OF_MXFP4 = 2


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
    problem = misfit(x, gate_up, down)
    if slots.rows is not None:
        problem = problem or "slots that do not share all rows"
    if meeting is None:
        problem = problem or "no place to meet"
    mosaic = kernel_module("expert_gate_up_down", implementation, problem)
    if mosaic is None:
        products = packed_expert_product_reference(x, experts, gate_up, down, clamp=None)
        return SlotProducts.in_order(products)
    return mosaic.expert_gate_up_down_mosaic(x, slots, gate_up, down, meeting)


@jax.named_scope("expert_gate_up_down")
def routed_gate_up_down(
    x: Array,
    is_row: Array,
    router: Router,
    weights: ExpertWeights,
    meeting: Array | None = None,
    *,
    rule: RouteRule,
    implementation: Implementation = "reference",
) -> ChosenProducts:
    """What experts make of the rows that choose them.

    Args:
      x: bfloat16 [N, H].
      is_row: bool [N]. Others choose no expert.
      meeting, implementation: as of ``expert_gate_up_down``; the Hopper kernel takes
        what ``weights_misfit`` and ``routes_misfit`` say.
      rule: of the choice; a shared expert is the last one.
    """
    problem = weights_misfit(x, weights) or routes_misfit(x, router, weights, rule)
    if meeting is None:
        problem = problem or "no place to meet"
    mosaic = kernel_module("expert_gate_up_down", implementation, problem)
    if mosaic is not None:
        given = x, is_row.astype(jnp.int32), router, weights, meeting
        return mosaic.routed_gate_up_down_mosaic(*given, rule=rule)
    logits = einsum_f32("nh,eh->ne", x, router.weight)[None]
    gate = None if router.gate is None else SharedGate(x, router.gate)
    chosen, factors = expert_routes_reference(logits, is_row, rule, gate)
    pair = weights.gate_up, weights.down
    if weights.shared is None:
        products = packed_expert_product_reference(x, chosen, *pair, clamp=None)
    else:
        products = packed_expert_product_reference(x, chosen[:, :-1], *pair, clamp=None)
        pair, first = (weights.shared.gate_up, weights.shared.down), jnp.zeros_like(chosen[:, -1:])
        last = packed_expert_product_reference(x, first, *pair, clamp=None)
        products = jnp.concatenate([products, last], axis=1)
    found = SlotProducts.in_order(products)
    places = jnp.where(is_row[:, None], found.places, -1)
    return ChosenProducts(found.products, places, factors)


def is_faster(x: Array, gate_up: PackedExperts, *, chooses: bool) -> bool:
    """Whether a launch is known to be the faster way for so many rows and such experts, if it takes
    them. MXFP8 was not timed.

    ``chooses``: whether rows choose their experts in it, too.
    """
    if gate_up.scale.dtype != jnp.uint8:
        return True
    return chooses and gate_up.bits == 4 and len(x) <= FASTER_ROWS_OF_MXFP4


def misfit(x: Array, gate_up: PackedExperts, down: PackedExperts) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    return ", ".join(_problems(x, gate_up, down)) or None


def routes_misfit(x: Array, router: Router, weights: ExpertWeights, rule: RouteRule) -> str | None:
    """Why the kernel cannot choose experts; None if it can."""
    experts, weight = weights.num_experts - rule.has_shared, router.weight
    pairs = len(x) * (rule.k + rule.has_shared)
    if experts % LOGITS_STEP or experts > MOST_EXPERTS or len(weight) != experts:
        return (
            f"{experts} experts and a router of {len(weight)} outputs: as many, a multiple of "
            f"{LOGITS_STEP} up to {MOST_EXPERTS}"
        )
    if any(array is not None and array.dtype != jnp.bfloat16 for array in router):
        return "a router or a gate in other than bfloat16"
    if weight.shape[1] % PART:
        return f"a router of {weight.shape[1]} inputs: a multiple of {PART}"
    if pairs > MOST_PAIRS or rule.k > MOST_CHOSEN:
        return f"{len(x)} rows and k = {rule.k}: at most {MOST_PAIRS} pairs, k {MOST_CHOSEN}"
    return None


def weights_misfit(x: Array, weights: ExpertWeights) -> str | None:
    """``misfit`` of experts and a shared one; None if the kernel can take them."""
    shared = weights.shared
    if shared is None:
        return misfit(x, weights.gate_up, weights.down)
    if (shared.num_experts, shared.gate_up.width) != (1, weights.gate_up.width):
        found = f"{shared.num_experts} shared experts of {shared.gate_up.width} units"
        return f"{found}: one with the {weights.gate_up.width} of others"
    return misfit(x, weights.gate_up, weights.down) or misfit(x, shared.gate_up, shared.down)


def stored_of(weights: PackedExperts) -> Stored | None:
    """How weights are stored, as the kernel knows it; None for others."""
    is_group = weights.block == (1, GROUP) and weights.scale.dtype == jnp.uint8
    if weights.code == "e4m3" and weights.block[0] > 1:
        return Stored("e4m3", weights.block)
    if weights.code != "int4" and is_group and weights.scale_code == "e8m0":
        return Stored(weights.code, weights.block)
    return None


def _problems(x: Array, gate_up: PackedExperts, down: PackedExperts) -> Iterator[str]:
    rows, hidden = x.shape
    if rows > ROWS:
        yield f"{rows} rows: at most {ROWS}"
    if x.dtype != jnp.bfloat16:
        yield f"rows of {x.dtype}: they must be bfloat16"
    if any(weights.factor is not None for weights in (gate_up, down)):
        yield "a factor for each output"
    kinds = {(each.code, each.block, each.scale.dtype, each.scale_code) for each in (gate_up, down)}
    stored = stored_of(gate_up)
    if stored is None or len(kinds) > 1:
        yield (
            f"{gate_up.code} with scales of {gate_up.block} in {gate_up.scale.dtype}, {down.code} "
            f"of {down.block}: both 8-bit floats with a float for blocks, or 4-bit or 8-bit floats "
            f"with a byte for {GROUP} inputs"
        )
        return
    size, (outputs, inputs) = stored.block(hidden, gate_up.width), stored.scaled
    if size is None or hidden > MOST_HIDDEN:
        least = LINE * 8 // stored.bits
        yield (
            f"{hidden} inputs and {gate_up.width} units: multiples of {WARPGROUPS * least}, up to "
            f"{MOST_HIDDEN}, and of {least}"
        )
    elif not stored.has_bytes and (outputs % OUTPUTS or inputs % (size // WARPS)):
        yield (
            f"blocks of {outputs} outputs and {inputs} inputs with a scale: multiples of {OUTPUTS} "
            f"and {size // WARPS}"
        )
