"""The threshold of a row on Hopper GPUs: a cluster of thread blocks shares it.

Each block holds its share in registers; what exceeds them is read from the cache in every step.

The answer is an entry of the row. It is searched for in the order of float32 numbers, between a
lower and an upper bound: each step weighs what lies at or above three pivots, and leaves a quarter
of the range. A step costs one meeting of the cluster. More pivots make fewer steps, but each pivot
costs a comparison of every entry and a sum over a warpgroup, so that seven or fifteen would take
longer by an estimate. All blocks see the same sums, so they take the same steps.

Raw logits are searched, and the threshold is one of them.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import cluster
from pallas_kernels.policy import truncate_shares

THREADS = 128  # of a warpgroup
HELD = 96  # entries of a thread in registers; 126 spilled some
PIVOTS = 3
SIGN = np.uint32(1 << 31)
LOWEST_KEY, HIGHEST_KEY = np.uint32(0x007FFFFF), np.uint32(0xFF800000)  # of -inf and inf
LEAST_MASS = 1e-30  # so that a tiny top_p keeps the likeliest entry
ROUNDING = 1e-3  # mass outside the nucleus that is far more than the sums' rounding
LOG2_E = 1 / math.log(2)


# Traced once for all the places that sample.
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
    """See pallas_kernels.truncate.truncation_threshold; only where ``misfit`` finds nothing.

    ``shares``: blocks that share a row; None: from pallas_kernels.policy. ``held``: entries of a
    thread in registers. ``interpret``: plgpu.InterpretGPUParams, for tests; it knows no clusters.
    """
    batch, nodes, size = logits.shape
    shares = truncate_shares(size) if shares is None else shares
    chunks = size // THREADS
    places = range(-(-chunks // shares))  # of a block's chunks
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

    def truncate_kernel(x_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref, out_ref, *scratch):
        row, share = lax.axis_index("row"), lax.axis_index("share")
        request = row // nodes
        k, p, m = (ref[request] for ref in (top_k_ref, top_p_ref, min_p_ref))
        wants_count = (k > 0) & (k <= size)
        wants_weight = (p < 1) | (m > 0)

        def store(threshold: Array | float) -> None:
            @pl.when(share == 0)
            def _store():
                out_ref[row] = jnp.float32(threshold)

        def filled(value: float) -> Array:
            return plgpu.layout_cast(jnp.full((THREADS,), value, jnp.float32), layout)

        def load(place: int) -> Array:
            """A block's chunk: one entry a thread, -inf past the row's end."""
            chunk = share + place * shares
            if (place + 1) * shares <= chunks:
                return plgpu.load(x_ref.at[row, pl.ds(chunk * THREADS, THREADS)], layout=layout)
            start = jnp.minimum(chunk, chunks - 1) * THREADS
            entries = plgpu.load(x_ref.at[row, pl.ds(start, THREADS)], layout=layout)
            lane = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layout)
            return jnp.where(lane + chunk * THREADS < size, entries, -jnp.inf)

        def exchange(
            turn: Array | int, values: Sequence[Array], merges: Sequence[Callable]
        ) -> list[Array]:
            """Each of ``values`` [128] merged over all blocks, in the same order everywhere.

            Of two slots, turns take one each: whoever writes a slot again has met all who read it
            in the meeting between.
            """
            if shares == 1:
                return list(values)
            (slots,) = scratch
            slot = turn % 2
            for place, value in enumerate(values):
                slots[slot, place] = value
            cluster.meet()
            everyone = [plgpu.cluster_ref(slots, {"share": jnp.int32(i)}) for i in range(shares)]
            return [
                functools.reduce(
                    merge,
                    [plgpu.load(ref.at[slot, place], layout=layout) for ref in everyone],
                )
                for place, merge in enumerate(merges)
            ]

        def search(
            entries_of_row: Callable[[], Iterator[Array]],
            turn: Array | int,
            bounds: tuple[Array, Array],
            wanted: Array,
            weigh: Callable[[Array], Array | float],
        ) -> tuple[Array, Array]:
            """The largest key in bounds such that entries at or above it weigh ``wanted``.

            The lower bound weighs enough, what is above the upper one does not. Also the next turn.
            """

            def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                turn, low, high = state
                width = ((high - low) >> 2) + 1
                pivots = [_number(low + np.uint32(i) * width) for i in range(1, PIVOTS + 1)]
                sums = [filled(0.0)] * PIVOTS
                for entries in entries_of_row():
                    weights = weigh(entries)
                    sums = [
                        one + jnp.where(entries >= pivot, weights, 0.0)
                        for one, pivot in zip(sums, pivots, strict=True)
                    ]
                sums = exchange(turn, sums, (jnp.add,) * PIVOTS)
                for one in sums:  # the fewer, the higher the pivot
                    enough = jnp.sum(one) >= wanted
                    low = jnp.where(enough, low + width, low)
                return turn + 1, low, jnp.minimum(high, low + (width - 1))

            turn, low, _ = lax.while_loop(
                lambda state: state[1] < state[2], step, (jnp.int32(turn), *bounds)
            )
            return turn, low

        @pl.when(jnp.logical_not(wants_count | wants_weight))
        def _keep_all():
            store(-math.inf)

        @pl.when(wants_count | wants_weight)
        def _truncate():
            in_registers = [load(place) for place in places[:held]]

            def entries_of_row() -> Iterator[Array]:
                yield from in_registers
                yield from (load(place) for place in places[held:])

            largest = functools.reduce(jnp.maximum, entries_of_row())
            (largest,) = exchange(0, (largest,), (jnp.maximum,))
            peak = jnp.max(largest)
            highest = jnp.minimum(_key(peak), HIGHEST_KEY)
            # These are the largest entries of 128 groups: as many are at least their least.
            low = _key(jnp.where(k <= THREADS, jnp.min(largest), -math.inf))
            low = jnp.where(wants_count, jnp.minimum(low, highest), LOWEST_KEY)
            high = jnp.where(wants_count, highest, LOWEST_KEY)
            turn, low = search(entries_of_row, 1, (low, high), k.astype(jnp.float32), lambda _: 1.0)
            least = _number(low)

            @pl.when(jnp.logical_not(wants_weight))
            def _of_count_alone():
                store(least)

            @pl.when(wants_weight)
            def _of_weight():
                warmth = temperature_ref[request]

                def weigh(entries: Array) -> Array:
                    return jnp.exp2((entries - peak) * (LOG2_E / warmth))

                total, lowest = filled(0.0), filled(math.inf)
                for entries in entries_of_row():
                    weights = jnp.where(entries >= least, weigh(entries), 0.0)
                    total += weights
                    lowest = jnp.minimum(lowest, jnp.where(weights >= m, entries, math.inf))
                total, lowest = exchange(turn, (total, lowest), (jnp.add, jnp.minimum))
                mass = jnp.maximum(p * jnp.sum(total), LEAST_MASS)
                # All that is less likely than this weighs less than what the nucleus leaves out.
                outside = jnp.maximum(1 - p, ROUNDING)
                bound = peak + warmth * (jnp.log(outside / size) - 1)
                start = jnp.maximum(low, _key(jnp.where(1 - p > ROUNDING, bound, -math.inf)))
                end = jnp.where(p < 1, highest, low)
                bounds = (jnp.minimum(start, end), end)
                _, nucleus = search(entries_of_row, turn + 1, bounds, mass, weigh)
                likely = jnp.where(m > 0, jnp.min(lowest), -math.inf)
                store(jnp.maximum(_number(nucleus), likely))

            if shares > 1:
                cluster.meet()  # nobody's slots go before all have read them

    kernel = plgpu.kernel(
        truncate_kernel,
        out_type=jax.ShapeDtypeStruct((batch * nodes,), jnp.float32),
        scratch_types=[plgpu.SMEM((2, PIVOTS, THREADS), jnp.float32)] * (shares > 1),
        grid=(batch * nodes,),
        grid_names=("row",),
        cluster=(shares,),
        cluster_names=("share",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    rows = logits.reshape(batch * nodes, size)
    return kernel(rows, temperature, top_k, top_p, min_p).reshape(batch, nodes)


def _key(number: Array) -> Array:
    """Integers in the order of the numbers."""
    bits = lax.bitcast_convert_type(number, jnp.uint32)
    return bits ^ ((0 - (bits >> 31)) | SIGN)  # all bits of a negative number


def _number(key: Array) -> Array:
    return lax.bitcast_convert_type(key ^ (((key >> 31) - 1) | SIGN), jnp.float32)
