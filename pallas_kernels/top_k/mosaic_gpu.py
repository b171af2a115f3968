"""top_k on Hopper GPUs, in one pass: a cluster of thread blocks shares a row.

Each block holds its share in registers and finds its k largest entries one by one. The first block
then merges the results of all. Numbers are compared through unsigned integer keys of the same
order; key 0 marks entries that were taken. (The keys are unsigned because jnp.where in jax 0.11.2
loses the sign of integers here.)
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import cluster, kernel_axes
from pallas_kernels.expert_slots import LEAST_LANES
from pallas_kernels.h100 import largest_fitting
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.products import total_f32
from pallas_kernels.top_k.routes import LEAST_SUM, RouteRule, SharedGate

THREADS = 128  # of a warpgroup
TAKEN = np.uint32(0)  # below the key of every number
SIGN = np.uint32(1 << 31)
NO_INDEX = np.int32(np.iinfo(np.int32).max)
LOWEST_PEAK = float(np.finfo(np.float32).min)  # finite, so that a row of only -inf gives no NaN


@functools.partial(jax.jit, static_argnames=("k", "shares", "interpret"))
def top_k_mosaic(
    x: Array,  # [..., n]
    *,
    k: int,
    shares: int | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """See pallas_kernels.top_k.top_k; only for arguments that ``misfit`` accepts.

    ``shares``: blocks that share a row; None: ``top_k_shares``. ``interpret``:
    plgpu.InterpretGPUParams, for tests; the interpreter does not support clusters.
    """
    size, rows = x.shape[-1], math.prod(x.shape[:-1])
    shares = top_k_shares(size) if shares is None else shares
    width = -(-size // (shares * THREADS)) * THREADS  # the last blocks overlap
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
    candidates = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

    @fixed_name(interpret)
    def top_k_kernel(x_ref, values_ref, indices_ref, log_sum_ref, *scratch):
        row, share = kernel_axes.index("row"), kernel_axes.index("share")

        def store(largest: Sequence[tuple[Array, Array]], log_sum: Array) -> None:
            log_sum_ref[row] = log_sum
            for place, (key, index) in enumerate(largest):
                values_ref[row, place] = _number(key)
                indices_ref[row, place] = index

        start = jnp.minimum(share * width, size - width)
        entries = plgpu.load(x_ref.at[row, pl.ds(start, width)], layout=layout)
        indices = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout) + start
        if shares * width > size:
            in_share = indices >= share * width
            entries = jnp.where(in_share, entries, -jnp.inf)
            keys = jnp.where(in_share, _key(entries), TAKEN)
        else:
            keys = _key(entries)
        largest = _largest(keys, indices, k)
        log_sum = _log_sum(entries, _number(largest[0][0]))
        if shares == 1:
            store(largest, log_sum)
            return

        lane = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=candidates)
        found = [
            plgpu.layout_cast(jnp.full((THREADS,), value), candidates)
            for value in (TAKEN, NO_INDEX, np.float32(-np.inf))
        ]
        for place, (key, index) in enumerate(largest):
            here = lane == share * k + place
            found[0] = jnp.where(here, key, found[0])
            found[1] = jnp.where(here, index, found[1])
        found[2] = jnp.where(lane == share, log_sum, found[2])
        for ref, value in zip(scratch, found, strict=True):
            ref[...] = value
        cluster.sync()

        @pl.when(share == 0)
        def _merge():
            keys, indices, log_sums = (
                functools.reduce(best, _of_all(ref, shares, candidates))
                for ref, best in zip(scratch, (jnp.maximum, jnp.minimum, jnp.maximum), strict=True)
            )
            store(_largest(keys, indices, k), _log_sum(log_sums, jnp.max(log_sums)))

        cluster.sync()  # no block may exit before the first has read its candidates

    kernel = plgpu.kernel(
        top_k_kernel,
        out_type=(
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((THREADS,), dtype)
            for dtype in (jnp.uint32, jnp.int32, jnp.float32)[: 3 if shares > 1 else 0]
        ],
        grid=(rows,),
        grid_names=kernel_axes.names("row"),
        cluster=(shares,),
        cluster_names=kernel_axes.names("share"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    values, indices, log_sum = kernel(x.reshape(rows, size))
    lead = x.shape[:-1]
    return values.reshape(*lead, k), indices.reshape(*lead, k), log_sum.reshape(lead)


def top_k_shares(size: int) -> int:
    """Thread blocks that share one row of ``size`` entries in top_k, at most 8 (one cluster).

    The fewest that leave each block 4096 entries or fewer. A block holds them in registers: 32 a
    thread, 64 in the longest rows.
    """
    return largest_fitting(lambda shares: shares * 4096 < 2 * size)


def _key(numbers: Array) -> Array:
    """Integers above 0, in the same order as the numbers."""
    bits = lax.bitcast_convert_type(numbers, jnp.uint32)
    return bits ^ ((0 - (bits >> 31)) | SIGN)  # flips the sign; all bits of a negative number


def _number(key: Array) -> Array:
    """The inverse of _key."""
    return lax.bitcast_convert_type(key ^ (((key >> 31) - 1) | SIGN), jnp.float32)


def _largest(keys: Array, indices: Array, k: int) -> list[tuple[Array, Array]]:
    """Keys and indices of the k largest entries; of equal ones the lowest index comes first."""
    largest = []
    for _ in range(k):
        key = jnp.max(keys)
        index = jnp.min(jnp.where(keys == key, indices, NO_INDEX))
        keys = jnp.where(indices == index, TAKEN, keys)
        largest.append((key, index))
    return largest


def _log_sum(entries: Array, peak: Array) -> Array:
    """log(sum(exp(entries))); no entry exceeds ``peak``."""
    peak = jnp.maximum(peak, LOWEST_PEAK)
    return peak + jnp.log(jnp.sum(jnp.exp(entries - peak)))


def _of_all(ref: Any, shares: int, layout: Any) -> list[Array]:
    """The contents of ``ref`` in the shared memory of each block of the cluster."""
    return [
        plgpu.load(plgpu.cluster_ref(ref, {kernel_axes.name("share"): jnp.int32(i)}), layout=layout)
        for i in range(shares)
    ]


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def expert_routes_mosaic(
    partials: Array,  # [S, M, E]
    is_row: Array,  # int32 [N]
    *,
    rule: RouteRule,
    gate: SharedGate | None = None,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.top_k.routes.expert_routes; only for arguments that ``misfit`` of that
    file accepts. A warpgroup has a row.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """

    @fixed_name(interpret)
    def expert_routes_kernel(partials_ref, is_row_ref, *refs):
        *gate_refs, experts_ref, weights_ref = refs
        row = kernel_axes.index("row")
        routes = _routes(rule, row, partials_ref, is_row_ref, gate_refs)
        _store_routes(row, routes, experts_ref, weights_ref)

    kernel = plgpu.kernel(
        expert_routes_kernel,
        out_type=_routes_type(len(is_row), rule),
        grid=(len(is_row),),
        grid_names=kernel_axes.names("row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(partials, is_row, *(gate or ()))


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def expert_routes_in_slots_mosaic(
    partials: Array,
    is_row: Array,
    *,
    rule: RouteRule,
    gate: SharedGate | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """See pallas_kernels.top_k.routes.expert_routes_in_slots, and ``expert_routes_mosaic``. The
    thread blocks of all rows are a cluster: each reads what the others have chosen.

    Returns experts, weights, the expert of each slot, and places.
    """
    rows, chosen, none = len(is_row), rule.k + rule.has_shared, partials.shape[-1] + rule.has_shared
    of_pairs = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    outputs = len(gate or ()) + 4  # they follow the gate, and scratch memory follows them

    @fixed_name(interpret)
    def expert_routes_kernel(partials_ref, is_row_ref, *refs):
        *gate_refs, experts_ref, weights_ref, expert_of_slot_ref, places_ref = refs[:outputs]
        row, first = kernel_axes.index("share"), kernel_axes.index("share") * chosen
        routes = _routes(rule, row, partials_ref, is_row_ref, gate_refs)
        _store_routes(row, routes, experts_ref, weights_ref)

        def store(choice: int, slot: Array) -> None:
            """Slots of the first of equal pairs have their expert, others none."""
            expert, pair = routes[choice][0], first + choice
            expert_of_slot_ref[pair] = jnp.where(slot == pair, expert, jnp.int32(none))
            place = slot * LEAST_LANES + row
            places_ref[row, choice] = jnp.where(expert < none, place, jnp.int32(-1))

        if rows == 1:
            for choice in range(chosen):
                store(choice, first + choice)
            return

        found = refs[-1]
        pair = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=of_pairs)
        experts = plgpu.layout_cast(jnp.full((THREADS,), NO_INDEX), of_pairs)
        for choice, (expert, _) in enumerate(routes):
            experts = jnp.where(pair == first + choice, expert, experts)
        found[...] = experts
        cluster.sync()

        is_first = (row == 0) | (routes[0][0] == none)  # or padding

        @pl.when(is_first)
        def _distinct():
            for choice in range(chosen):
                store(choice, first + choice)

        @pl.when(jnp.logical_not(is_first))
        def _compare():
            every = functools.reduce(jnp.minimum, _of_all(found, rows, of_pairs))
            for choice, (expert, _) in enumerate(routes):
                store(choice, jnp.min(jnp.where(every == expert, pair, NO_INDEX)))

        cluster.sync()  # no block may exit before the others have read what it chose

    kernel = plgpu.kernel(
        expert_routes_kernel,
        out_type=(
            *_routes_type(rows, rule),
            jax.ShapeDtypeStruct((rows * chosen,), jnp.int32),
            jax.ShapeDtypeStruct((rows, chosen), jnp.int32),
        ),
        scratch_types=[plgpu.SMEM((THREADS,), jnp.int32)] if rows > 1 else [],
        grid=(1,),
        grid_names=kernel_axes.names("launch"),
        cluster=(rows,),
        cluster_names=kernel_axes.names("share"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(partials, is_row, *(gate or ()))


def _routes(
    rule: RouteRule, row: Array, partials_ref: Any, is_row_ref: Any, gate_refs: Sequence[Any]
) -> list[tuple[Array, Array]]:
    """Experts of a row, and their weights."""
    num_splits, _, num_experts = partials_ref.shape
    layout = _strided(num_experts)
    logits = total_f32(
        [plgpu.load(partials_ref.at[i, row], layout=layout) for i in range(num_splits)]
    )
    indices = plgpu.broadcasted_iota(jnp.int32, (num_experts,), 0, layout=layout)
    largest = _largest(_key(logits), indices, rule.k)
    weights = _weights(rule, logits, [_number(key) for key, _ in largest])
    experts = [index for _, index in largest]
    if rule.has_shared:
        weights.append(_weight_of_shared(row, *gate_refs))
        experts.append(jnp.int32(num_experts))
    is_there, none = is_row_ref[row] != 0, jnp.int32(num_experts + rule.has_shared)
    experts = [jnp.where(is_there, expert, none) for expert in experts]
    return list(zip(experts, weights, strict=True))


def _store_routes(
    row: Array, routes: Sequence[tuple[Array, Array]], experts_ref: Any, weights_ref: Any
) -> None:
    for choice, (expert, weight) in enumerate(routes):
        experts_ref[row, choice] = expert
        weights_ref[row, choice] = weight


def _routes_type(rows: int, rule: RouteRule) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = rows, rule.k + rule.has_shared
    return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)


def _weights(rule: RouteRule, logits: Array, largest: Sequence[Array]) -> list[Array]:
    """The weights of the chosen experts, whose logits are the ``largest``."""
    match rule.scores:
        case "softmax":
            log_sum = _log_sum(logits, largest[0])
            weights = [jnp.exp(logit - log_sum) for logit in largest]
        case "sigmoid":
            weights = [1 / (1 + jnp.exp(-logit)) for logit in largest]
        case "chosen":
            weights = [jnp.exp(logit - largest[0]) for logit in largest]
            total = functools.reduce(jnp.add, weights)
            weights = [weight / total for weight in weights]
    if rule.normalize:
        total = functools.reduce(jnp.add, weights) + LEAST_SUM
        weights = [weight / total for weight in weights]
    return [weight * rule.scale for weight in weights]


def _weight_of_shared(row: Array, *gate_refs: Any) -> Array:
    if not gate_refs:
        return jnp.float32(1)
    x_ref, weight_ref = gate_refs
    layout = _strided(weight_ref.shape[0])
    x, weight = (
        plgpu.load(ref, layout=layout).astype(jnp.float32) for ref in (x_ref.at[row], weight_ref)
    )
    return 1 / (1 + jnp.exp(-jnp.sum(x * weight)))


def _strided(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
