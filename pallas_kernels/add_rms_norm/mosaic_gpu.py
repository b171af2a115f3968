"""Residual addition and norm on Hopper GPUs: a cluster of thread blocks shares a row."""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import cluster
from pallas_kernels.products import total_f32
from pallas_kernels.tuning import norm_shares

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "shares", "interpret"))
def add_rms_norm_mosaic(
    x: Array,  # [..., H]
    parts: Array,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    shares: int | None = None,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only where ``misfit`` finds nothing.

    ``shares``: blocks that share a row; None: from pallas_kernels.tuning. ``interpret``:
    plgpu.InterpretGPUParams, for tests; it knows no clusters.
    """
    num_parts, hidden = len(parts), x.shape[-1]
    rows = x.size // hidden
    shares = norm_shares(rows, hidden) if shares is None else shares
    width = hidden // shares
    # One for all dtypes: each would have its own by default.
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))

    def add_rms_norm_kernel(x_ref, parts_ref, weight_ref, total_ref, normed_ref, *scratch):
        row, columns = lax.axis_index("row"), pl.ds(lax.axis_index("share") * width, width)

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout)

        residual = load(x_ref.at[row, columns])
        added = [load(parts_ref.at[part, row, columns]) for part in range(num_parts)]
        scales = load(weight_ref.at[columns])
        y = total_f32(added).astype(x.dtype)  # as a product in one part is rounded
        total = (residual.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
        total_ref[row, columns] = total
        wide = total.astype(jnp.float32)  # as the residual stream holds it
        squares = jnp.sum(wide * wide)
        if shares > 1:
            squares = _sum_over_cluster(squares, shares, *scratch)
        scale = lax.rsqrt(squares / hidden + eps)
        normed_ref[row, columns] = (wide * scale).astype(x.dtype) * scales
        if shares > 1:
            cluster.wait()  # nobody's sum goes before all have read it

    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    kernel = plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(flat, flat),
        scratch_types=[plgpu.SMEM((1,), jnp.float32)] if shares > 1 else [],
        grid=(rows,),
        grid_names=("row",),
        cluster=(shares,),
        cluster_names=("share",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    total, normed = kernel(x.reshape(rows, hidden), parts.reshape(num_parts, -1, hidden), weight)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _sum_over_cluster(own: Array, shares: int, sum_ref: Any) -> Array:
    """Sum of a value of each block; says that it has read them, which is still to be waited for."""
    sum_ref[0] = own
    cluster.arrive()
    cluster.wait()
    sums = [plgpu.cluster_ref(sum_ref, {"share": jnp.int32(i)})[0] for i in range(shares)]
    total = functools.reduce(jnp.add, sums)
    cluster.arrive()
    return total
