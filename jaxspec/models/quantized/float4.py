"""Weights of 4-bit floats (E2M1) with scales of groups of inputs, as files have them: MXFP4, NVFP4.

Activations stay as they are.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear
from jaxspec.models.map_after import map_after
from jaxspec.models.quantized.float8 import E4M3
from jaxspec.models.quantized.packed_linear import PackedLinear
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.models.wrapped_tensors import OutputsFirst
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.four_bits import ScaleCode, scaled_groups, widened_pairs, widened_scales
from pallas_kernels.packed_expert_product import weights_misfit
from pallas_kernels.packed_expert_product.scales import with_e5m3_scales
from pallas_kernels.packed_experts import FORMATS, PackedExperts
from pallas_kernels.packed_float_product import misfit, packed_float_product
from pallas_kernels.packed_order import file_order, stored_order
from pallas_kernels.products import input_last_product
from pallas_kernels.selection import Kernels

MOST_WIDENED = 1 << 26  # weights that are widened at a time: 128 MiB in bfloat16
MOST_TILES = 64
LARGEST, LARGEST_SCALE = 6.0, 448.0  # of E2M1, and of e4m3
# A number is rounded up from here on; in a tie the even code counts.
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

Float4Format = Literal["mxfp4", "nvfp4"]


@pytree
class Float4Linear(PackedLinear):
    """A Linear of the AnyLinear protocol: w = number * scale * factor, of which memory holds what
    the file has.

    Attributes:
      values: uint8 [*out, in / 2], two numbers in a byte (see pallas_kernels/four_bits.py).
      scale: [n, *out] of n groups of consecutive inputs: e4m3, or bytes of ``scale_code``.
      factor: float32 [*out], so projections that are computed together each have theirs; None: 1.
      activations: the dtype of inputs and outputs.
      scale_code: of scales that are bytes.
      reordered: whether ``values`` are as packed_order.py says, and scales of e4m3
        are bytes: see ``in_float4_order``.
    """

    values: Array = array()
    scale: Array = array()
    factor: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [*out]
    axes: tuple[str, ...] = static()
    activations: jnp.dtype = static()
    scale_code: ScaleCode = static(default="e8m0")
    reordered: bool = static(default=False)

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        size, *outputs = self.axes
        by_group = (size if len(self.scale) > 1 else "group", *outputs)
        return {
            "values": (*outputs, size),
            "scale": by_group,
            "factor": tuple(outputs),
            "bias": tuple(outputs),
        }

    def mapped(self, source: Source, tensor_map: TensorMap) -> "Float4Linear":
        return self.replace(
            values=tensor_map.of_source(OutputsFirst(source), "codes", self.values),
            scale=tensor_map.of_source(source, "scale", self.scale),
            factor=tensor_map.of_source(source, "factor", self.factor),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], computed in float32 and rounded to ``dtype``."""
        return self._widened(*self._flat()).astype(dtype).reshape(*self.out_shape, -1)

    @property
    def packed(self) -> PackedExperts:
        """The weights as those of a single expert, all outputs in one part. For reordered ones."""
        values, scale, factor = self._flat()
        return PackedExperts(
            values=values[None, None],
            scale=scale[None, None],
            factor=None if factor is None else factor[None, None],
            code="e2m1",
            block=(1, 2 * values.shape[-1] // len(scale)),
            scale_code=self.scale_code,
        )

    @property
    def _bits(self) -> tuple[int, int]:
        return 4, 16

    def _num_splits(self, choose: Callable[..., int], x: Any, kernels: Kernels) -> int:
        """The kernel makes no partial sums."""
        return 1

    def _runs_packed(self, x: Any, kernels: Kernels) -> bool:
        if "packed_float_product" not in kernels or not self.reordered:
            return False
        return misfit(x.reshape(-1, x.shape[-1]), self.packed) is None

    def _multiply(self, x: Any, num_splits: int, kernels: Kernels, dtype: jnp.dtype) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        if self._runs_packed(x, kernels):
            y = packed_float_product(rows, self.packed, dtype=dtype, implementation="mosaic_gpu")
        else:
            y = self._widened_product(rows, dtype)
        return y.reshape(1, *x.shape[:-1], *self.out_shape)

    def _widened_product(self, x: Array, dtype: jnp.dtype) -> Array:
        """x [M, in] -> [M, V], by tiles of outputs, of which one is in memory at a time."""
        values, scale, factor = self._flat()
        num_tiles = _num_tiles(len(values), x.shape[-1])

        def product(values: Array, scale: Array, factor: Array | None) -> Array:
            wide = self._widened(values, scale, factor).astype(x.dtype)
            return input_last_product(x, wide, dtype)

        if num_tiles == 1:
            return product(values, scale, factor)
        tiles = (
            values.reshape(num_tiles, -1, values.shape[-1]),
            jnp.moveaxis(scale.reshape(len(scale), num_tiles, -1), 1, 0),
            None if factor is None else factor.reshape(num_tiles, -1),
        )
        products = map_after(x, lambda tile: product(*tile), tiles)
        return jnp.moveaxis(products, 0, 1).reshape(len(x), -1)

    def _widened(self, values: Array, scale: Array, factor: Array | None) -> Array:
        """Weights float32 [V, in] of values [V, in / 2], scale [n, V] and factor [V]."""
        pairs = file_order(values, "e2m1") if self.reordered else values
        scales = widened_scales(scale, self.scale_code).T
        if factor is not None:
            scales = scales * factor[:, None]
        return scaled_groups(widened_pairs(pairs, "e2m1"), scales)

    def _flat(self) -> tuple[Array, Array, Array | None]:
        """Values, scale and factor with all outputs in one dimension V."""
        values, scale = self.values, self.scale
        factor = None if self.factor is None else self.factor.reshape(-1)
        return values.reshape(-1, values.shape[-1]), scale.reshape(len(scale), -1), factor


def _num_tiles(width: int, depth: int) -> int:
    """The fewest parts of equal size of so many outputs that are widened at a time; 1 where none
    are small enough."""
    fitting = (
        count
        for count in range(1, MOST_TILES + 1)
        if not width % count and width // count * depth <= MOST_WIDENED
    )
    return next(fitting, 1)


def float4_shape(
    linear: Linear, num_groups: int, scale_dtype: jnp.dtype, *, factor: bool = False
) -> Float4Linear:
    """A Float4Linear of ShapeDtypeStructs in place of a Linear of such. ``factor``: whether it has
    one."""
    size, *outputs = linear.weight.shape
    return Float4Linear(
        values=array_shape(*outputs, size // 2, dtype=jnp.dtype("uint8")),
        scale=array_shape(num_groups, *outputs, dtype=scale_dtype),
        factor=array_shape(*outputs, dtype=jnp.dtype("float32"), when=factor),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def in_float4_order(linear: Float4Linear) -> Float4Linear:
    """The same weights as the kernel reads them, if it can, in as many bytes."""
    shapes = jax.eval_shape(lambda weights: _with_bytes_as_scales(weights).packed, linear)
    if linear.reordered or weights_misfit(shapes) is not None:
        return linear
    made = _with_bytes_as_scales(linear)
    return made.replace(values=stored_order(made.values, "e2m1"), reordered=True)


def _with_bytes_as_scales(linear: Float4Linear) -> Float4Linear:
    """The same weights, where scales in e4m3 become those in e5m3."""
    if linear.scale.dtype != E4M3:
        return linear
    values, scale = with_e5m3_scales(linear.values, jnp.moveaxis(linear.scale, 0, -1))
    return linear.replace(values=values, scale=jnp.moveaxis(scale, -1, 0), scale_code="e5m3")


def rounded_to_float4(linear: Linear, form: Float4Format) -> Float4Linear:
    """A Float4Linear near the weights, as the kernel reads it, if it can.

    MXFP4: no weight of a group is cut off. NVFP4: the largest weight of each group becomes 6 times
    its scale, nearly, and the largest of all 448 times the factor as much.

    Raises ValueError for inputs that are no multiple of the format's groups.
    """
    group = FORMATS[form].block[1]
    weight = jnp.moveaxis(linear.weight.astype(jnp.float32), 0, -1)
    if weight.shape[-1] % group:
        raise ValueError(f"{weight.shape[-1]} inputs are no multiple of a group of {group}")
    by_group = weight.reshape(*weight.shape[:-1], -1, group)
    span = jnp.max(jnp.abs(by_group), axis=-1) / LARGEST
    factor = None
    if form == "nvfp4":
        whole = jnp.maximum(jnp.max(span) / LARGEST_SCALE, 2.0**-126)
        scale = (span / whole).astype(E4M3)
        steps, factor = scale.astype(jnp.float32) * whole, jnp.full(weight.shape[:-1], whole)
    else:
        mantissa, exponent = jnp.frexp(span)  # the former is 0.5 of a power of two
        scale = jnp.clip(exponent - (mantissa == 0.5) + 127, 1, 252).astype(jnp.uint8)
        steps = widened_scales(scale)
    numbers = by_group / jnp.where(steps > 0, steps, 1.0)[..., None]
    codes = _nearest(numbers).reshape(weight.shape)
    made = Float4Linear(
        values=codes[..., ::2] | codes[..., 1::2] << 4,
        scale=jnp.moveaxis(scale, -1, 0),
        factor=factor,
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )
    return in_float4_order(made)


def _nearest(numbers: Array) -> Array:
    """The codes uint8 of the numbers nearest to floats."""
    magnitude = jnp.abs(numbers)
    above = [
        (magnitude > middle) | (magnitude == middle) & (code % 2 == 1)
        for code, middle in enumerate(MIDDLES)
    ]
    code = sum(each.astype(jnp.uint8) for each in above)
    return code | (numbers < 0).astype(jnp.uint8) << 3
