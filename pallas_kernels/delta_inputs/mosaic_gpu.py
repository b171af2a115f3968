"""Inputs of a gated delta rule on Hopper GPUs: a warpgroup per node and key head, of few nodes one
per 128 channels of them, and one that projects their strengths and decays.

XLA takes a launch for the convolution, for each of the two norms and for the decays. The sums are
those of the reference, in its order.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import kernel_axes
from pallas_kernels.delta_inputs.arguments import ConvolvedNodes, Strengths, Unprojected
from pallas_kernels.delta_inputs.reference import NORM_EPS
from pallas_kernels.delta_rule.tokens import Tokens
from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.mosaic_module_names import fixed_name

ENTRIES = 128  # channels that a warpgroup has at once, an entry a thread
LAYOUT = plgpu.Layout.WG_STRIDED((ENTRIES,), vec_size=1)
AT_ONCE = MULTIPROCESSORS * 16  # thread blocks of a warpgroup that run at the same time
AT_ONCE_PROJECTING = AT_ONCE // 2  # those that may project have up to 64 registers a thread


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("by_parts", "interpret"))
def delta_inputs_mosaic(
    nodes: ConvolvedNodes,
    strengths: Strengths,
    *,
    by_parts: bool | None = None,
    interpret: Any = None,
) -> tuple[Array, Tokens]:
    """See pallas_kernels.delta_inputs.delta_inputs; only for arguments that ``misfit`` accepts.

    Args:
      by_parts: whether each part of a node's channels has a warpgroup; None: by how many there are.
      interpret: plgpu.InterpretGPUParams, for tests.
    """
    qkvz, before, _, _, taps = nodes
    batch, size, groups, _ = qkvz.shape
    past, wide, values = before.shape[1], taps.shape[-1] - 2 * ENTRIES, strengths.bias.shape[-1]
    parts = taps.shape[-1] // ENTRIES
    blocks = parts * groups * size * batch
    if by_parts is None:
        by_parts = blocks <= AT_ONCE
    if not by_parts or blocks // parts * (parts + 1) > AT_ONCE_PROJECTING:
        strengths = strengths.projected()
    # They are projected while others compute the channels.
    projects = isinstance(strengths.ba, Unprojected)
    of_strengths = parts if projects else 0

    @fixed_name(interpret)
    def delta_inputs_kernel(qkvz_ref, before_ref, rows_ref, places_ref, taps_ref, *refs):
        *ba_refs, bias_ref, log_ref, q_ref, k_ref, v_ref, g_ref, beta_ref = refs
        sequence, node, group = map(kernel_axes.index, ("sequence", "node", "group"))
        row, at = jnp.minimum(rows_ref[sequence], len(before) - 1), (sequence, node, group)

        def convolved(part: Any) -> Array:
            """So many channels of the node's, after SiLU."""
            columns, total = pl.ds(part * ENTRIES, ENTRIES), 0.0
            for tap in range(past):
                place = places_ref[sequence, node, tap]
                old = _load(before_ref.at[row, jnp.minimum(place, past - 1), group, columns])
                of_node = jnp.maximum(place - past, 0)
                new = _load(qkvz_ref.at[sequence, of_node, group, columns])
                taken = jnp.where(place < past, old, new)
                total = total + taken * _load(taps_ref.at[tap, group, columns])
            last = _load(qkvz_ref.at[*at, columns])
            total = total + last * _load(taps_ref.at[past, group, columns])
            return total / (1 + jnp.exp(-total))

        def write(part: Any) -> None:
            channels = convolved(part)

            @pl.when(part == 0)
            def _query():
                q_ref[*at] = _unit_length(channels) / ENTRIES**0.5

            @pl.when(part == 1)
            def _key():
                k_ref[*at] = _unit_length(channels)

            @pl.when((part >= 2) & (part < parts))
            def _value():
                v_ref[*at, pl.ds((part - 2) * ENTRIES, ENTRIES)] = channels

        first, *others = [kernel_axes.index("part")] if by_parts else range(parts)
        if projects:
            pl.when(first < parts)(functools.partial(write, first))
        else:
            for part in (first, *others):
                write(part)

        @pl.when(first == of_strengths)
        def _strengths():
            if projects:
                x_ref, weight_ref = ba_refs
                projected = _projected(x_ref.at[sequence, node], weight_ref.at[group], 2 * values)
            else:
                [ba_ref] = ba_refs
                projected = [ba_ref[*at, place] for place in range(2 * values)]
            ba = [entry.astype(jnp.float32) for entry in projected]
            for value in range(values):
                strength, decay = ba[value], ba[values + value] + bias_ref[group, value]
                # softplus, which does not overflow
                step = jnp.maximum(decay, 0) + jnp.log(1 + jnp.exp(-jnp.abs(decay)))
                g_ref[*at, value] = -jnp.exp(log_ref[group, value]) * step
                beta_ref[*at, value] = 1 / (1 + jnp.exp(-strength))

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, size, groups, *shape), jnp.dtype(jnp.float32))

    kernel = plgpu.kernel(
        delta_inputs_kernel,
        out_type=(
            *(float32(ENTRIES), float32(ENTRIES), float32(wide)),
            *(float32(values), float32(values)),
        ),
        grid=(parts + projects if by_parts else 1, groups, size, batch),
        grid_names=kernel_axes.names("part", "group", "node", "sequence"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    q, k, v, g, beta = kernel(*nodes, *jax.tree.leaves(strengths))
    return q, Tokens(k, v.reshape(*v.shape[:-1], values, -1), g, beta)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False).astype(jnp.float32)


def _projected(x_ref: Any, weight_ref: Any, outputs: int) -> list[Array]:
    """x [H] times weight [outputs, H], rounded as other products are."""
    (width,), dtype = x_ref.shape, x_ref.dtype
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // ENTRIES, 8))
    x, *rows = (
        plgpu.load(ref, layout=layout).astype(jnp.float32)
        for ref in (x_ref, *(weight_ref.at[output] for output in range(outputs)))
    )
    return [jnp.sum(x * row).astype(dtype) for row in rows]


def _unit_length(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)
