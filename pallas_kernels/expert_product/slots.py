"""Pairs of a row and an expert that it chose, grouped by expert.

A slot is an expert and W lanes, each with a row. The weights of a slot's expert are read once for
all its lanes. How many slots and lanes there are depends on shapes only; slots may stay empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LEAST_LANES = 8  # what the tensor cores take
MOST_LANES = 64
LEAST_SHARED = LEAST_LANES  # rows: of no more, every slot has all of them


class Slots(NamedTuple):
    """Attributes:
    expert: int32 [S], the number of experts for an empty slot.
    rows: int32 [S, W] the row of each lane, some row where a lane is empty. None: lane n of every
      slot has row n.
    places: int32 [N, k] where the results of a pair are: slot * W + lane. 0 for a pair without an
      expert.
    """

    expert: Array
    rows: Array | None
    places: Array


def num_lanes(pairs: int, num_experts: int) -> int:
    """Lanes of a slot: twice as many as an expert has rows on average, for most have fewer then."""
    lanes = LEAST_LANES
    while lanes < MOST_LANES and lanes * num_experts < 2 * pairs:
        lanes *= 2
    return lanes


def make_slots(experts: Array, num_experts: int) -> tuple[Slots, int]:
    """The slots of experts int32 [N, k], and their lanes. ``num_experts`` stands for no expert."""
    if len(experts) <= LEAST_SHARED:
        return _shared(experts, num_experts), LEAST_LANES
    lanes = num_lanes(experts.size, num_experts)
    return _grouped(experts, num_experts, lanes), lanes


def _shared(experts: Array, num_experts: int) -> Slots:
    """A slot for every pair, which stays empty where an earlier pair has the same expert."""
    flat = experts.reshape(-1)
    pairs = jnp.arange(len(flat), dtype=jnp.int32)
    same = flat[:, None] == flat
    slot = jnp.min(jnp.where(same, pairs, len(flat)), axis=1)  # the first pair of that expert
    lane = pairs // experts.shape[1]
    places = jnp.where(flat < num_experts, slot * LEAST_LANES + lane, 0)
    own = jnp.where(slot == pairs, flat, num_experts)
    return Slots(own, None, places.reshape(experts.shape))


def _grouped(experts: Array, num_experts: int, lanes: int) -> Slots:
    """Each expert has the slots that its pairs fill, in order; the last may have empty lanes.

    Without a sort or a running sum, which GPUs would do in several launches: every pair is compared
    with all others.
    """
    flat = experts.reshape(-1)
    pairs = jnp.arange(len(flat), dtype=jnp.int32)
    size = min(len(flat), num_experts + len(flat) // lanes)  # slots that may be filled
    earlier = (flat[:, None] == flat) & (pairs < pairs[:, None])
    rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)  # of a pair among its expert's
    begins = rank % lanes == 0  # a slot
    before = jnp.sum(begins & (flat < flat[:, None]), axis=1, dtype=jnp.int32)
    slot, lane = before + rank // lanes, rank % lanes
    has_expert = flat < num_experts
    places = jnp.where(has_expert, slot * lanes + lane, size * lanes)
    own = jnp.full(size, num_experts, jnp.int32).at[slot].set(flat, mode="drop")
    row = pairs // experts.shape[1]
    rows = jnp.zeros(size * lanes, jnp.int32).at[places].set(row, mode="drop")
    places = jnp.where(has_expert, places, 0).reshape(experts.shape)
    return Slots(own, rows.reshape(size, lanes), places)
