"""From a router's product to the experts that each row goes through, and their weights."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.expert_slots import Slots, make_slots
from pallas_kernels.products import added_up, einsum_f32
from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.top_k.reference import top_k_reference

LEAST_SUM = 1e-20  # added to sums of scores that are divided by: sigmoids may all be 0
LANES = 128  # experts are a multiple, as inputs of a shared expert's gate are of twice as many
MOST_EXPERTS = 1024
MOST_CHOSEN = 16


@dataclasses.dataclass(frozen=True)
class RouteRule:
    """How each row chooses experts, and how these are weighted.

    Attributes:
      k: experts that a row chooses, those with the largest logits.
      scores: of a logit. chosen: a softmax over the chosen ones.
      normalize: scores are divided by their sum.
      scale: factor of the weights, after that.
      has_shared: whether all rows go through one more expert, which is the last one.
    """

    k: int
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    has_shared: bool = False


class SharedGate(NamedTuple):
    """What the weight of the shared expert is the sigmoid of: the product of x [N, H] and weight
    [H]."""

    x: Array
    weight: Array


@jax.named_scope("routing")
def expert_routes(
    partials: Array,
    is_row: Array,
    rule: RouteRule,
    gate: SharedGate | None = None,
    implementation: Implementation = "reference",
) -> tuple[Array, Array]:
    """Experts int32 [N, k], the best first, and float32 weights [N, k]; with a shared expert
    [N, k + 1]. Of equal logits the lower index comes first.

    Args:
      partials: float32 [S, M, E], partial sums of logits; rows past N are padding.
      is_row: bool [N]. Others choose no expert: E, with a shared one E + 1.
      gate: of the shared expert; None: it counts 1.
      implementation: see selection.Implementation; the kernel is one of top_k.
    """
    mosaic = kernel_module("top_k", implementation, misfit(partials, rule, gate))
    if mosaic is None:
        return expert_routes_reference(partials, is_row, rule, gate)
    return mosaic.expert_routes_mosaic(partials, is_row.astype(jnp.int32), rule=rule, gate=gate)


def expert_routes_in_slots(
    partials: Array,
    is_row: Array,
    rule: RouteRule,
    gate: SharedGate | None = None,
    implementation: Implementation = "reference",
) -> tuple[Array, Array, Slots]:
    """``expert_routes`` of few rows, and the slots that pairs of a row and an expert go to (see
    expert_slots.py); places of rows without experts are below 0."""
    problem = slots_misfit(len(is_row), rule) or misfit(partials, rule, gate)
    mosaic = kernel_module("top_k", implementation, problem)
    if mosaic is None:
        experts, weights = expert_routes_reference(partials, is_row, rule, gate)
        slots = make_slots(experts, partials.shape[-1] + rule.has_shared)
        places = jnp.where(is_row[:, None], slots.places, -1)
        return experts, weights, slots._replace(places=places)
    kernel = mosaic.expert_routes_in_slots_mosaic
    experts, weights, *slots = kernel(partials, is_row.astype(jnp.int32), rule=rule, gate=gate)
    expert, places = slots
    return experts, weights, Slots(expert, None, places)


def slots_misfit(rows: int, rule: RouteRule) -> str | None:
    """Why the kernel cannot find slots for so many rows, None if it can."""
    pairs = rows * (rule.k + rule.has_shared)
    if rows not in (1, 2, 4, 8) or pairs > LANES:
        return f"{rows} rows with {pairs} experts: 1, 2, 4 or 8 rows, at most {LANES} experts"
    return None


def expert_routes_reference(
    partials: Array, is_row: Array, rule: RouteRule, gate: SharedGate | None
) -> tuple[Array, Array]:
    """See ``expert_routes``."""
    rows, num_experts = len(is_row), partials.shape[-1]
    largest, experts, log_sum = top_k_reference(added_up(partials, rows), rule.k)
    match rule.scores:
        case "softmax":
            weights = jnp.exp(largest - log_sum[:, None])
        case "sigmoid":
            weights = jax.nn.sigmoid(largest)
        case "chosen":
            weights = jax.nn.softmax(largest, axis=-1)
    if rule.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM)
    weights = weights * rule.scale
    if rule.has_shared:
        weight = jnp.ones((rows, 1))
        if gate is not None:
            weight = jax.nn.sigmoid(einsum_f32("nh,h->n", *gate))[:, None]
        weights = jnp.concatenate([weights, weight], axis=1)
        last = jnp.full((rows, 1), num_experts, jnp.int32)
        experts = jnp.concatenate([experts, last], axis=1)
    return jnp.where(is_row[:, None], experts, num_experts + rule.has_shared), weights


def misfit(partials: Array, rule: RouteRule, gate: SharedGate | None = None) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    num_experts = partials.shape[-1]
    if partials.dtype != jnp.float32 or num_experts % LANES or num_experts > MOST_EXPERTS:
        return (
            f"{partials.dtype} logits of {num_experts} experts: float32, a multiple of {LANES} up "
            f"to {MOST_EXPERTS}"
        )
    if rule.k > MOST_CHOSEN:
        return f"k = {rule.k}: at most {MOST_CHOSEN}"
    if gate is None:
        return None
    if any(array.dtype != jnp.bfloat16 for array in gate) or len(gate.weight) % (2 * LANES):
        return (
            f"a gate of {len(gate.weight)} inputs in {gate.x.dtype}: bfloat16, a multiple of "
            f"{2 * LANES}"
        )
    return None
