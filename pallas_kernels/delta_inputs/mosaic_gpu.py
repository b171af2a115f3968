"""Inputs of a gated delta rule on Hopper GPUs: a warpgroup per node and key head.

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
from pallas_kernels.mosaic_module_names import fixed_name

ENTRIES = 128  # channels that a warpgroup has at once, an entry a thread
LAYOUT = plgpu.Layout.WG_STRIDED((ENTRIES,), vec_size=1)


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("interpret",))
def delta_inputs_mosaic(
    nodes: ConvolvedNodes, strengths: Strengths, *, interpret: Any = None
) -> tuple[Array, Tokens]:
    """See pallas_kernels.delta_inputs.delta_inputs; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    qkvz, before, _, _, taps = nodes
    batch, size, groups, _ = qkvz.shape
    past, wide, values = before.shape[1], taps.shape[-1] - 2 * ENTRIES, strengths.bias.shape[-1]

    @fixed_name(interpret)
    def delta_inputs_kernel(
        qkvz_ref, before_ref, rows_ref, places_ref, taps_ref, ba_ref, bias_ref, log_ref,
        q_ref, k_ref, v_ref, g_ref, beta_ref,
    ):  # fmt: skip
        sequence, node, group = map(kernel_axes.index, ("sequence", "node", "group"))
        row = jnp.minimum(rows_ref[sequence], len(before) - 1)
        earlier = [places_ref[sequence, node, tap] for tap in range(past)]

        def convolved(first: int) -> Array:
            """The channels from ``first`` on, after SiLU."""
            part, total = pl.ds(first, ENTRIES), 0.0
            for tap, place in enumerate(earlier):
                old = _load(before_ref.at[row, jnp.minimum(place, past - 1), group, part])
                of_node = jnp.maximum(place - past, 0)
                new = _load(qkvz_ref.at[sequence, of_node, group, part])
                taken = jnp.where(place < past, old, new)
                total = total + taken * _load(taps_ref.at[tap, group, part])
            last = _load(qkvz_ref.at[sequence, node, group, part])
            total = total + last * _load(taps_ref.at[past, group, part])
            return total / (1 + jnp.exp(-total))

        q_ref[sequence, node, group] = _unit_length(convolved(0)) / ENTRIES**0.5
        k_ref[sequence, node, group] = _unit_length(convolved(ENTRIES))
        for first in range(0, wide, ENTRIES):
            part = pl.ds(first, ENTRIES)
            v_ref[sequence, node, group, part] = convolved(2 * ENTRIES + first)
        for value in range(values):
            at = sequence, node, group
            strength = ba_ref[*at, value].astype(jnp.float32)
            decay = ba_ref[*at, values + value].astype(jnp.float32) + bias_ref[group, value]
            rate = jnp.exp(log_ref[group, value])
            # softplus, which does not overflow
            step = jnp.maximum(decay, 0) + jnp.log(1 + jnp.exp(-jnp.abs(decay)))
            g_ref[*at, value] = -rate * step
            beta_ref[*at, value] = 1 / (1 + jnp.exp(-strength))

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, size, groups, *shape), jnp.dtype(jnp.float32))

    kernel = plgpu.kernel(
        delta_inputs_kernel,
        out_type=(
            *(float32(ENTRIES), float32(ENTRIES), float32(wide)),
            *(float32(values), float32(values)),
        ),
        grid=(groups, size, batch),
        grid_names=kernel_axes.names("group", "node", "sequence"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    q, k, v, g, beta = kernel(*nodes, *strengths)
    return q, Tokens(k, v.reshape(*v.shape[:-1], values, -1), g, beta)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False).astype(jnp.float32)


def _unit_length(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)
