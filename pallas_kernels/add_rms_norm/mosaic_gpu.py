"""Residual addition and norm on Hopper GPUs: one warpgroup per row.

Clusters of 2 to 8 blocks per row were slower on an H100 (48 rows of 4096: 3.6 to 4.1 us, against
3.5 us with one block).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.products import total_f32
from pallas_kernels.round_tokens.group_parts import group_scales
from pallas_kernels.round_tokens.reference import GROUP, rounded_by, scale_of
from pallas_kernels.round_tokens.row_parts import RowParts

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm_mosaic(
    x: Array,  # [..., H]
    partials: Array | ChosenProducts,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    beside: Array | None = None,  # [1, R, H]
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    norm, addends = _norm_of(x, partials, eps)
    rows = x.size // norm.width

    @fixed_name(interpret)
    def add_rms_norm_kernel(x_ref, weight_ref, *refs):
        row = kernel_axes.index("row")
        *addend_refs, total_ref, normed_ref = refs
        if beside is None:
            normed_ref[row] = norm.normed(row, x_ref, addend_refs, weight_ref, total_ref)
            return
        *addend_refs, beside_ref = addend_refs

        @pl.when(row < rows)
        def _norm():
            normed_ref[row] = norm.normed(row, x_ref, addend_refs, weight_ref, total_ref)

        @pl.when(row >= rows)
        def _copy():
            normed_ref[row] = norm.load(beside_ref.at[row - rows])

    num_beside = 0 if beside is None else beside.shape[1]
    others = () if beside is None else (beside[0],)
    out_type = _like(x, rows), _like(x, rows + num_beside)
    kernel = _kernel(add_rms_norm_kernel, out_type, rows + num_beside, interpret)
    total, normed = kernel(x.reshape(rows, -1), weight, *addends, *others)
    return total.reshape(x.shape), normed.reshape(x.shape) if beside is None else normed[None]


@functools.partial(jax.jit, static_argnames=("eps", "padded", "interpret"))
def add_rms_norm_rounded_mosaic(
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    padded: int,
    *,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm_rounded, and ``add_rms_norm_mosaic``.

    ``padded``: rows that the scales have.
    """
    norm, addends = _norm_of(x, partials, eps)
    rows = x.size // norm.width

    @fixed_name(interpret)
    def add_rms_norm_kernel(x_ref, weight_ref, *refs):
        row = kernel_axes.index("row")
        *addend_refs, total_ref, rounded_ref, scale_ref = refs
        normed = norm.normed(row, x_ref, addend_refs, weight_ref, total_ref)
        scale = scale_of(jnp.max(jnp.abs(normed.astype(jnp.float32))))
        rounded_ref[row] = rounded_by(normed.astype(jnp.float32), scale)
        scale_ref[0, row] = scale

    out_type = _like(x, rows), *_rounded(norm.width, rows, 1, padded)
    kernel = _kernel(add_rms_norm_kernel, out_type, rows, interpret)
    total, rounded, scale = kernel(x.reshape(rows, -1), weight, *addends)
    return total.reshape(x.shape), rounded.reshape(x.shape), scale


@functools.partial(jax.jit, static_argnames=("eps", "padded", "interpret"))
def add_rms_norm_grouped_mosaic(
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    padded: int,
    *,
    interpret: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm_grouped, and ``add_rms_norm_rounded_mosaic``."""
    norm, addends = _norm_of(x, partials, eps)
    rows, parts = x.size // norm.width, RowParts(norm.width, warpgroups=1)

    @fixed_name(interpret)
    def add_rms_norm_kernel(x_ref, weight_ref, *refs):
        row = kernel_axes.index("row")
        *addend_refs, total_ref, normed_ref, rounded_ref, scale_ref = refs
        normed = norm.normed(row, x_ref, addend_refs, weight_ref, total_ref)
        normed_ref[row] = normed
        wide = normed.astype(jnp.float32)
        scale = group_scales(parts, wide, scale_ref, row, interpret)
        rounded_ref[row] = rounded_by(wide, scale)

    out_type = (
        _like(x, rows),
        _like(x, rows),
        *_rounded(norm.width, rows, norm.width // GROUP, padded),
    )
    kernel = _kernel(add_rms_norm_kernel, out_type, rows, interpret)
    *arrays, scale = kernel(x.reshape(rows, -1), weight, *addends)
    total, normed, rounded = (array.reshape(x.shape) for array in arrays)
    return total, normed, rounded, scale


@dataclasses.dataclass(frozen=True)
class _Norm:
    """How a warpgroup adds to a row of the residual stream, and norms the sum.

    Attributes:
      count: partial sums, or choices.
      is_chosen: whether what is added are products of chosen experts.
    """

    width: int
    dtype: jnp.dtype
    eps: float
    count: int
    is_chosen: bool

    def load(self, ref: Any) -> Array:
        # The same layout for all dtypes; the default depends on the dtype.
        vec_size = math.gcd(self.width // THREADS, 4)
        return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED((self.width,), vec_size=vec_size))

    def normed(
        self, row: Array, x_ref: Any, addend_refs: Any, weight_ref: Any, total_ref: Any
    ) -> Array:
        """A row's norm; its sum is stored."""
        residual = self.load(x_ref.at[row])
        terms = (self._chosen if self.is_chosen else self._partial)(row, *addend_refs)
        scales = self.load(weight_ref)
        y = total_f32(terms).astype(self.dtype)  # rounded as an unsplit product is
        total = (residual.astype(jnp.float32) + y.astype(jnp.float32)).astype(self.dtype)
        total_ref[row] = total
        wide = total.astype(jnp.float32)  # from the rounded sum, as the reference does
        scale = lax.rsqrt(jnp.sum(wide * wide) / self.width + self.eps)
        return (wide * scale).astype(self.dtype) * scales

    def _partial(self, row: Array, partials_ref: Any) -> list[Array]:
        return [self.load(partials_ref.at[split, row]) for split in range(self.count)]

    def _chosen(
        self, row: Array, products_ref: Any, places_ref: Any, weights_ref: Any
    ) -> list[Array]:
        places = [places_ref[row, choice] for choice in range(self.count)]
        products = [self.load(products_ref.at[jnp.maximum(place, 0)]) for place in places]
        weights = [weights_ref[row, choice] for choice in range(self.count)]
        return [
            jnp.where(place >= 0, product * weight, 0.0)
            for place, product, weight in zip(places, products, weights, strict=True)
        ]


def _norm_of(
    x: Array, partials: Array | ChosenProducts, eps: float
) -> tuple[_Norm, tuple[Array, ...]]:
    """A norm, and the arrays that it adds."""
    width = x.shape[-1]
    if isinstance(partials, ChosenProducts):
        return _Norm(width, x.dtype, eps, partials.places.shape[1], True), tuple(partials)
    flat = partials.reshape(len(partials), -1, width)
    return _Norm(width, x.dtype, eps, len(partials), False), (flat,)


def _like(x: Array, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype)


def _rounded(width: int, rows: int, groups: int, padded: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Rounded rows and their scales."""
    return (
        jax.ShapeDtypeStruct((rows, width), FLOAT8),
        jax.ShapeDtypeStruct((groups, padded), jnp.float32),
    )


def _kernel(body: Any, out_type: Any, blocks: int, interpret: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=kernel_axes.names("row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
