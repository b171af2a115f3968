"""Pairs of a row and an expert that it chose, grouped by expert.

A slot is an expert and W lanes, each with a row. The weights of a slot's expert are read once for
all its lanes. How many slots and lanes there are depends on shapes only; slots may stay empty.

Of few pairs there is no sort and no running sum, which a GPU would do in several launches: every
pair is compared with all others. Many are sorted.
"""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

MOST_ROWS = 4096  # of a product
LEAST_LANES = 8  # what the tensor cores take
MOST_LANES = 64
MOST_SHARED = LEAST_LANES  # rows: of no more, every slot has all of them
MOST_COMPARED = 4096  # pairs: the comparisons grow with their square


class Slots(NamedTuple):
    """Where pairs are multiplied.

    Attributes:
      expert: int32 [S], the number of experts for an empty slot.
      rows: int32 [S, W] the row of each lane, some row where a lane is empty. None: lane n of every
        slot has row n.
      places: int32 [N, k] slot * W + lane of a pair. Any place for a pair without an expert.
    """

    expert: Array
    rows: Array | None
    places: Array


class SlotProducts(NamedTuple):
    """Products of pairs, where a kernel has left them.

    Attributes:
      products: float32 [L, H], of all lanes.
      places: int32 [N, k], the entry of each pair. Any place for a pair without an expert.
    """

    products: Array
    places: Array

    @classmethod
    def in_order(cls, products: Array) -> Self:
        """Those of products [N, k, H], one after the other."""
        pairs = jnp.arange(products[..., 0].size, dtype=jnp.int32)
        return cls(products.reshape(-1, products.shape[-1]), pairs.reshape(products.shape[:2]))

    @property
    def by_pair(self) -> Array:
        """[N, k, H]"""
        return self.products[self.places]


def num_lanes(rows: int, k: int, num_experts: int) -> int:
    """Lanes of a slot: twice as many as an expert has rows on average, for most have fewer then."""
    lanes = LEAST_LANES
    if rows > MOST_SHARED:
        while lanes < MOST_LANES and lanes * num_experts < 2 * rows * k:
            lanes *= 2
    return lanes


def make_slots(experts: Array, num_experts: int) -> Slots:
    """The slots of experts int32 [N, k], where ``num_experts`` stands for none."""
    rows, k = experts.shape
    if rows <= MOST_SHARED:
        return _shared(experts, num_experts)
    lanes = num_lanes(rows, k, num_experts)
    grouped = _grouped if experts.size <= MOST_COMPARED else _sorted
    return grouped(experts, num_experts, lanes)


def _shared(experts: Array, num_experts: int) -> Slots:
    """A slot for every pair, which stays empty where an earlier pair has the same expert."""
    flat, pairs = experts.reshape(-1), jnp.arange(experts.size, dtype=jnp.int32)
    same = flat[:, None] == flat
    slot = jnp.min(jnp.where(same, pairs, experts.size), axis=1)  # the first pair of that expert
    expert_of_slot = jnp.where(slot == pairs, flat, num_experts)
    places = slot * LEAST_LANES + pairs // experts.shape[1]
    return Slots(expert_of_slot, None, places.reshape(experts.shape))


def _grouped(experts: Array, num_experts: int, lanes: int) -> Slots:
    """Each expert has the slots that its pairs fill, in order; the last may have empty lanes."""
    flat, pairs = experts.reshape(-1), jnp.arange(experts.size, dtype=jnp.int32)
    size = _most_slots(experts, num_experts, lanes)
    same = flat[:, None] == flat
    rank = jnp.sum(same & (pairs < pairs[:, None]), axis=1, dtype=jnp.int32)  # in its expert
    begins = rank % lanes == 0  # a slot
    before = jnp.sum(begins & (flat < flat[:, None]), axis=1, dtype=jnp.int32)
    places = (before + rank // lanes) * lanes + rank % lanes
    # Pairs without an expert come last, perhaps past all slots: no lane has them.
    kept = jnp.where(flat < num_experts, places, -1)
    lane = jnp.arange(size * lanes, dtype=jnp.int32)[:, None]
    pair = jnp.max(jnp.where(kept == lane, pairs, -1), axis=1).reshape(size, lanes)
    expert_of_slot = jnp.where(pair[:, 0] < 0, num_experts, flat[pair[:, 0]])
    rows = jnp.maximum(pair, 0) // experts.shape[1]
    last = size * lanes - 1
    return Slots(expert_of_slot, rows, jnp.minimum(places, last).reshape(experts.shape))


def _sorted(experts: Array, num_experts: int, lanes: int) -> Slots:
    """``_grouped`` of many pairs."""
    flat, size = experts.reshape(-1), _most_slots(experts, num_experts, lanes)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    filled = -(-counts // lanes)  # slots of each expert
    ends = jnp.cumsum(filled)
    pairs = jnp.arange(flat.size, dtype=jnp.int32)
    keys = jnp.sort(flat * flat.size + pairs)  # alone they are sorted faster than with pairs
    by_expert, order = keys // flat.size, keys % flat.size
    first_lane = (ends - filled) * lanes - (jnp.cumsum(counts) - counts)
    first_lane = jnp.append(first_lane, size * lanes)  # pairs without an expert come last
    lane = first_lane[by_expert] + pairs
    rows = jnp.zeros(size * lanes, jnp.int32).at[lane].set(order // experts.shape[1], mode="drop")
    places = jnp.zeros_like(flat).at[order].set(jnp.minimum(lane, size * lanes - 1))
    slot = jnp.arange(size, dtype=jnp.int32)
    expert_of_slot = jnp.sum(slot[:, None] >= ends, axis=1, dtype=jnp.int32)
    return Slots(expert_of_slot, rows.reshape(size, lanes), places.reshape(experts.shape))


def _most_slots(experts: Array, num_experts: int, lanes: int) -> int:
    """Slots that may be filled."""
    return min(experts.size, num_experts + experts.size // lanes)
