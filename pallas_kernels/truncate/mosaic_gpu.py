"""truncation_threshold on Hopper GPUs: a cluster of thread blocks shares a row.

Each block holds its share of the row in registers. Entries that do not fit are read again, from
the L2 cache, in every step.

The threshold is one of the raw logits. It is found by a search over all float32 numbers, in their
order, between a lower and an upper bound. Each step sums the weights of the entries at or above
each of three pivots, which leaves a quarter of the range. A step costs one cluster barrier. More
pivots would need fewer steps, but each pivot costs a comparison of every entry and a sum over a
warpgroup: by an estimate, 7 or 15 pivots would take longer. All blocks see the same sums, so all
take the same steps.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import cluster, kernel_axes
from pallas_kernels.h100 import largest_fitting
from pallas_kernels.mosaic_module_names import fixed_name

THREADS = 128  # of a warpgroup
HELD = 96  # entries that a thread holds in registers; with 126 some were spilled
PIVOTS = 3
SIGN = np.uint32(1 << 31)
LOWEST_KEY, HIGHEST_KEY = np.uint32(0x007FFFFF), np.uint32(0xFF800000)  # of -inf and inf
MIN_MASS = 1e-30  # above 0, so that a tiny top_p keeps the likeliest entry
ROUNDING = 1e-3  # far above the rounding errors of the sums, relative to the mass
LOG2_E = 1 / math.log(2)
LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


# Traced once for all call sites.
@functools.partial(jax.jit, static_argnames=("shares", "held", "interpret"))
def truncation_threshold_mosaic(
    logits: Array,  # [B, N, V]
    temperature: Array,  # [B]
    top_k: Array,
    top_p: Array,
    min_p: Array,
    *,
    shares: int | None = None,
    held: int = HELD,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.truncate.truncation_threshold; only for logits that ``misfit`` accepts.

    ``shares``: blocks that share a row; None: ``truncate_shares``. ``held``: entries that a
    thread holds in registers. ``interpret``: plgpu.InterpretGPUParams, for tests; the interpreter
    does not support clusters.
    """
    batch, nodes, size = logits.shape
    plan = _Plan(size, truncate_shares(size) if shares is None else shares, held)

    @fixed_name(interpret)
    def truncate_kernel(x_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref, out_ref, *scratch):
        row, share = kernel_axes.index("row"), kernel_axes.index("share")
        request = row // nodes
        k, p, m = (ref[request] for ref in (top_k_ref, top_p_ref, min_p_ref))
        wants_count = (k > 0) & (k <= size)
        wants_weight = (p < 1) | (m > 0)
        part = _RowPart(plan, x_ref, scratch, row, share)

        def store(threshold: Array | float) -> None:
            @pl.when(share == 0)
            def _store():
                out_ref[row] = jnp.float32(threshold)

        @pl.when(jnp.logical_not(wants_count | wants_weight))
        def _keep_all():
            store(-math.inf)

        @pl.when(wants_count | wants_weight)
        def _truncate():
            held = part.held_entries()
            peak, highest, low, exchanges = _least_by_count(part, held, k, wants_count)
            least = _number(low)

            @pl.when(jnp.logical_not(wants_weight))
            def _top_k_only():
                store(least)

            @pl.when(wants_weight)
            def _top_p_and_min_p():
                softmax = _Softmax(peak, temperature_ref[request])
                keys = low, least, highest
                store(_least_by_weight(part, held, softmax, keys, (p, m), exchanges))

            if plan.shares > 1:
                cluster.sync()  # no block may exit before all have read its slots

    kernel = plgpu.kernel(
        truncate_kernel,
        out_type=jax.ShapeDtypeStruct((batch * nodes,), jnp.float32),
        scratch_types=[plgpu.SMEM((2, PIVOTS, THREADS), jnp.float32)] * (plan.shares > 1),
        grid=(batch * nodes,),
        grid_names=kernel_axes.names("row"),
        cluster=(plan.shares,),
        cluster_names=kernel_axes.names("share"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    rows = logits.reshape(batch * nodes, size)
    return kernel(rows, temperature, top_k, top_p, min_p).reshape(batch, nodes)


class _Plan(NamedTuple):
    """How a row of ``size`` logits is divided: among ``shares`` blocks, each of whose threads holds
    up to ``held`` entries."""

    size: int
    shares: int
    held: int

    @property
    def chunks(self) -> int:
        return self.size // THREADS

    @property
    def places(self) -> range:
        """Those of a block's chunks."""
        return range(-(-self.chunks // self.shares))


class _Softmax(NamedTuple):
    """What weights are relative to."""

    peak: Array
    temperature: Array

    def weigh(self, entries: Array) -> Array:
        return jnp.exp2((entries - self.peak) * (LOG2_E / self.temperature))


class _RowPart(NamedTuple):
    """A block's share of a row: its entries, and what it exchanges with the row's other blocks."""

    plan: _Plan
    x: Any
    scratch: Sequence[Any]
    row: Array
    share: Array

    def load(self, place: int) -> Array:
        """One of the block's chunks: one entry per thread, -inf past the end of the row."""
        size, shares, _ = self.plan
        chunk, chunks = self.share + place * shares, self.plan.chunks
        if (place + 1) * shares <= chunks:
            return plgpu.load(self.x.at[self.row, pl.ds(chunk * THREADS, THREADS)], layout=LAYOUT)
        start = jnp.minimum(chunk, chunks - 1) * THREADS
        entries = plgpu.load(self.x.at[self.row, pl.ds(start, THREADS)], layout=LAYOUT)
        lane = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=LAYOUT)
        return jnp.where(lane + chunk * THREADS < size, entries, -jnp.inf)

    def held_entries(self) -> list[Array]:
        """Those that stay in registers."""
        return [self.load(place) for place in self.plan.places[: self.plan.held]]

    def entries(self, held: Sequence[Array]) -> Iterator[Array]:
        """All of the block's, some from registers."""
        yield from held
        yield from (self.load(place) for place in self.plan.places[self.plan.held :])

    def exchange(
        self, number: Array | int, values: Sequence[Array], merges: Sequence[Callable]
    ) -> list[Array]:
        """Each of ``values`` [128] merged over all blocks, in the same order in every block.

        ``number`` counts the exchanges of a row. Even and odd exchanges use different slots of
        shared memory. Before a slot is written again, the barrier of the exchange between has
        shown that every block has read it.
        """
        shares = self.plan.shares
        if shares == 1:
            return list(values)
        (slots,) = self.scratch
        slot = number % 2
        for place, value in enumerate(values):
            slots[slot, place] = value
        cluster.sync()
        everyone = [
            plgpu.cluster_ref(slots, {kernel_axes.name("share"): jnp.int32(i)})
            for i in range(shares)
        ]
        return [
            functools.reduce(
                merge, [plgpu.load(ref.at[slot, place], layout=LAYOUT) for ref in everyone]
            )
            for place, merge in enumerate(merges)
        ]

    def search(
        self,
        held: Sequence[Array],
        exchanges: Array | int,
        bounds: tuple[Array, Array],
        wanted: Array,
        weigh: Callable[[Array], Array | float],
    ) -> tuple[Array, Array]:
        """The largest key in ``bounds`` such that entries at or above it weigh ``wanted``.

        The entries at or above the lower bound must weigh enough, those above the upper bound must
        not. Returns the number of exchanges so far, and the key.
        """

        def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            exchanges, low, high = state
            width = ((high - low) >> 2) + 1
            pivots = [_number(low + np.uint32(i) * width) for i in range(1, PIVOTS + 1)]
            sums = [_filled(0.0)] * PIVOTS
            for entries in self.entries(held):
                weights = weigh(entries)
                sums = [
                    total + jnp.where(entries >= pivot, weights, 0.0)
                    for total, pivot in zip(sums, pivots, strict=True)
                ]
            sums = self.exchange(exchanges, sums, (jnp.add,) * PIVOTS)
            for weight in sums:  # sums fall as the pivots rise: count those that are enough
                enough = jnp.sum(weight) >= wanted
                low = jnp.where(enough, low + width, low)
            return exchanges + 1, low, jnp.minimum(high, low + (width - 1))

        exchanges, low, _ = lax.while_loop(
            lambda state: state[1] < state[2], step, (jnp.int32(exchanges), *bounds)
        )
        return exchanges, low


def _least_by_count(
    part: _RowPart, held: Sequence[Array], k: Array, wants_count: Array
) -> tuple[Array, Array, Array, Array]:
    """The row's largest entry, its key, the key of the least entry that top-k keeps, and the number
    of exchanges so far."""
    largest = functools.reduce(jnp.maximum, part.entries(held))
    (largest,) = part.exchange(0, (largest,), (jnp.maximum,))
    peak = jnp.max(largest)
    highest = jnp.minimum(_key(peak), HIGHEST_KEY)
    # ``largest`` holds the maxima of 128 groups of entries. At least 128 entries, and so at least k
    # if k <= 128, are no smaller than the smallest of them.
    low = _key(jnp.where(k <= THREADS, jnp.min(largest), -math.inf))
    low = jnp.where(wants_count, jnp.minimum(low, highest), LOWEST_KEY)
    high = jnp.where(wants_count, highest, LOWEST_KEY)
    count = k.astype(jnp.float32)
    exchanges, low = part.search(held, 1, (low, high), count, lambda _: 1.0)
    return peak, highest, low, exchanges


def _least_by_weight(
    part: _RowPart,
    held: Sequence[Array],
    softmax: _Softmax,
    keys: tuple[Array, Array, Array],
    limits: tuple[Array, Array],
    exchanges: Array,
) -> Array:
    """The least entry that top-p and min-p (``limits``) keep of those that top-k keeps; ``keys``:
    the lowest of these, its entry, and the highest."""
    (low, least, highest), (p, m), (peak, temperature) = keys, limits, softmax
    total, lowest = _filled(0.0), _filled(math.inf)
    for entries in part.entries(held):
        weights = jnp.where(entries >= least, softmax.weigh(entries), 0.0)
        total += weights
        lowest = jnp.minimum(lowest, jnp.where(weights >= m, entries, math.inf))
    total, lowest = part.exchange(exchanges, (total, lowest), (jnp.add, jnp.minimum))
    mass = jnp.maximum(p * jnp.sum(total), MIN_MASS)
    # All entries below this bound together weigh less than what top-p may leave out.
    outside = jnp.maximum(1 - p, ROUNDING)
    bound = peak + temperature * (jnp.log(outside / part.plan.size) - 1)
    start = jnp.maximum(low, _key(jnp.where(1 - p > ROUNDING, bound, -math.inf)))
    end = jnp.where(p < 1, highest, low)
    bounds = (jnp.minimum(start, end), end)
    _, nucleus = part.search(held, exchanges + 1, bounds, mass, softmax.weigh)
    likely = jnp.where(m > 0, jnp.min(lowest), -math.inf)
    return jnp.maximum(_number(nucleus), likely)


def _filled(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((THREADS,), value, jnp.float32), LAYOUT)


def truncate_shares(size: int) -> int:
    """Thread blocks that share one row of ``size`` logits in truncate, at most 8 (one cluster).

    Depends on the size only: the rounding of a row's sums must not depend on the number of rows.
    """
    return largest_fitting(lambda shares: shares * 2048 <= size)


def _key(number: Array) -> Array:
    """Unsigned integers in the same order as the numbers."""
    bits = lax.bitcast_convert_type(number, jnp.uint32)
    return bits ^ ((0 - (bits >> 31)) | SIGN)  # flips the sign; all bits of a negative number


def _number(key: Array) -> Array:
    """The inverse of _key."""
    return lax.bitcast_convert_type(key ^ (((key >> 31) - 1) | SIGN), jnp.float32)
