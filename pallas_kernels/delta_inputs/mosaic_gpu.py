"""Inputs of a gated delta rule on Hopper GPUs: a warpgroup per node and key head, of few nodes one
per 128 channels of them.

XLA takes a launch for the convolution, for each of the two norms and for the decays. The sums are
those of the reference, in its order.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import kernel_axes
from pallas_kernels.delta_inputs.arguments import ConvolvedNodes, Strengths
from pallas_kernels.delta_inputs.reference import NORM_EPS
from pallas_kernels.delta_rule.tokens import Tokens
from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.mosaic_module_names import fixed_name

ENTRIES = 128  # channels that a warpgroup has at once, an entry a thread
LAYOUT = plgpu.Layout.WG_STRIDED((ENTRIES,), vec_size=1)
AT_ONCE = MULTIPROCESSORS * 16  # thread blocks of a warpgroup that run at the same time


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
    if by_parts is None:
        by_parts = parts * groups * size * batch <= AT_ONCE

    @fixed_name(interpret)
    def delta_inputs_kernel(
        qkvz_ref, before_ref, rows_ref, places_ref, taps_ref, ba_ref, bias_ref, log_ref,
        q_ref, k_ref, v_ref, g_ref, beta_ref,
    ):  # fmt: skip
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

            @pl.when(part >= 2)
            def _value():
                v_ref[*at, pl.ds((part - 2) * ENTRIES, ENTRIES)] = channels

        first, *others = [kernel_axes.index("part")] if by_parts else range(parts)
        for part in (first, *others):
            write(part)

        @pl.when(first == 0)
        def _strengths():
            for value in range(values):
                strength = ba_ref[*at, value].astype(jnp.float32)
                decay = ba_ref[*at, values + value].astype(jnp.float32) + bias_ref[group, value]
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
        grid=(parts if by_parts else 1, groups, size, batch),
        grid_names=kernel_axes.names("part", "group", "node", "sequence"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    q, k, v, g, beta = kernel(*nodes, *strengths)
    return q, Tokens(k, v.reshape(*v.shape[:-1], values, -1), g, beta)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False).astype(jnp.float32)


def _unit_length(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)
