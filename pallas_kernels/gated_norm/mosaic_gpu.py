"""Gated norms by heads on Hopper GPUs: a warpgroup per row and head, which may also round it."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import kernel_axes
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.round_tokens.reference import rounded_by, scale_of

ENTRIES = 128  # of a head, an entry a thread
LAYOUT = plgpu.Layout.WG_STRIDED((ENTRIES,), vec_size=1)


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def gated_norm_mosaic(
    x: Array, projected: Array, norm: Array, eps: float, *, interpret: Any = None
) -> Array:
    """See pallas_kernels.gated_norm.gated_norm; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    rows, width = len(x), x[0].size

    @fixed_name(interpret)
    def gated_norm_kernel(x_ref, projected_ref, norm_ref, out_ref):
        row, columns = kernel_axes.index("row"), _columns(x)
        out_ref[row, columns] = _normed(x_ref, projected_ref, norm_ref, eps)

    out = jax.ShapeDtypeStruct((rows, width), projected.dtype)
    return _kernel(gated_norm_kernel, x, out, interpret)(x, projected, norm)


@functools.partial(jax.jit, static_argnames=("eps", "padded", "interpret"))
def gated_norm_rounded_mosaic(
    x: Array, projected: Array, norm: Array, eps: float, padded: int, *, interpret: Any = None
) -> tuple[Array, Array]:
    """See pallas_kernels.gated_norm.gated_norm_rounded, and ``gated_norm_mosaic``."""
    rows, width = len(x), x[0].size

    @fixed_name(interpret)
    def gated_norm_rounded_kernel(x_ref, projected_ref, norm_ref, rounded_ref, scale_ref):
        row, columns = kernel_axes.index("row"), _columns(x)
        normed = _normed(x_ref, projected_ref, norm_ref, eps).astype(jnp.float32)
        scale = scale_of(jnp.max(jnp.abs(normed)))
        rounded_ref[row, columns] = rounded_by(normed, scale)
        scale_ref[_head(x), row] = scale

    out = (
        jax.ShapeDtypeStruct((rows, width), FLOAT8),
        jax.ShapeDtypeStruct((width // ENTRIES, padded), jnp.float32),
    )
    return _kernel(gated_norm_rounded_kernel, x, out, interpret)(x, projected, norm)


def _head(x: Array) -> Array:
    """The head of this warpgroup, of all groups."""
    return kernel_axes.index("group") * x.shape[2] + kernel_axes.index("head")


def _columns(x: Array) -> Any:
    """Where this warpgroup's head is in a row of the result."""
    return pl.ds(_head(x) * ENTRIES, ENTRIES)


def _normed(x_ref: Any, projected_ref: Any, norm_ref: Any, eps: float) -> Array:
    row, group, head = map(kernel_axes.index, ("row", "group", "head"))
    first = projected_ref.shape[-1] - (x_ref.shape[2] - head) * ENTRIES
    x = _load(x_ref.at[row, group, head])
    gate = _load(projected_ref.at[row, group, pl.ds(first, ENTRIES)])
    scale = lax.rsqrt(jnp.sum(x * x) / ENTRIES + eps)
    gate = gate / (1 + jnp.exp(-gate))
    return (x * scale * _load(norm_ref) * gate).astype(projected_ref.dtype)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False).astype(jnp.float32)


def _kernel(body: Any, x: Array, out_type: Any, interpret: Any) -> Any:
    rows, groups, heads, _ = x.shape
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(heads, groups, rows),
        grid_names=kernel_axes.names("head", "group", "row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
