"""Weights of 4 or 8 bits whose scales are shared by groups of inputs: w = (value - zero) * scale.

The format of AWQ, GPTQ and rounding to nearest (see formats/ for their files). Activations stay as
they are, or are rounded to 8-bit floats (e4m3) when they are used, with a scale for each token.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear
from jaxspec.models.quantized.packed_linear import PackedLinear, rounded_rows
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.models.wrapped_tensors import OutputsFirst
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.o_gate_up_down.weights import PackedWeights
from pallas_kernels.packed_product import misfit, packed_product, sizes_misfit
from pallas_kernels.packed_product.order import SPAN, input_order, kernel_order
from pallas_kernels.packed_product.reference import dequantized
from pallas_kernels.products import input_last_product
from pallas_kernels.selection import Kernels

MOST_SHARES = 32  # devices that may share inputs which have a single scale


@pytree
class GroupedLinear(PackedLinear):
    """A Linear of the AnyLinear protocol. ``values`` hold the input last, as kernels read weights.

    Attributes:
      values: int4 or int8 [*out, in].
      scale: float [n, *out] of n groups.
      zero: whole numbers, as ``scale``; None: all 0.
      groups: int32 [in], the group of each input; None: they follow each other, in / n inputs each.
      activations: the dtype of inputs and outputs.
      reordered: whether the inputs of ``values`` are in the order of the kernel: see
        packed_product/order.py and ``in_kernel_order``. The order depends on ``rounds``.
      rounds: whether x is rounded to e4m3.
    """

    values: Array = array()
    scale: Array = array()
    zero: Array | None = array(default=None)
    groups: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [*out]
    axes: tuple[str, ...] = static()
    activations: jnp.dtype = static()
    reordered: bool = static(default=False)
    rounds: bool = static(default=False)

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        size, *outputs = self.axes
        by_group = (size if self.groups is None and len(self.scale) > 1 else "group", *outputs)
        return {
            "values": (*outputs, size),
            "scale": by_group,
            "zero": by_group,
            "groups": (size,),
            "bias": tuple(outputs),
        }

    def mapped(self, source: Source, tensor_map: TensorMap) -> "GroupedLinear":
        return self.replace(
            values=tensor_map.of_source(OutputsFirst(source), "values", self.values),
            scale=tensor_map.of_source(source, "scale", self.scale),
            zero=tensor_map.of_source(source, "zero", self.zero),
            groups=tensor_map.array(f"{source.names[0]}.groups", self.groups),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )

    def reads_rounded(self, dtype: jnp.dtype, kernels: Kernels, num_groups: int = 1) -> bool:
        if num_groups != 1:
            return False
        return self.rounds and "round_tokens" in kernels and dtype == jnp.bfloat16

    @property
    def _bits(self) -> tuple[int, int]:
        return 4, self._x_bits

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], computed in float32 and rounded to ``dtype``."""
        weights = self._as_stored(dtype)
        return input_order(weights, self._x_bits) if self.reordered else weights

    def packed(self) -> PackedWeights | None:
        """The weights [V, in] as kernels read them beside rows that are not rounded; None if they
        are stored otherwise."""
        if not self.reordered or self.rounds:
            return None
        return PackedWeights(*self._flat())

    @property
    def _x_bits(self) -> int:
        """Bits of the rows that are multiplied, for the kernel's order of inputs."""
        return 8 if self.rounds else 16

    def _multiply(self, x: Any, num_splits: int, kernels: Kernels, dtype: jnp.dtype) -> Array:
        """x [..., in] -> [S, ..., *out]; S is 1 where no kernel runs."""
        rows, x_scale = x, None
        if self.rounds:
            rows, x_scale = rounded_rows(x, 1, kernels)
        if self._runs_packed(x, kernels):
            flat = packed_product(
                rows.reshape(-1, x.shape[-1]),
                *self._flat(),
                x_scale,
                num_splits=num_splits,
                dtype=dtype,
                implementation="mosaic_gpu",
            )
            return flat.reshape(num_splits, *x.shape[:-1], *self.out_shape)
        if x_scale is None:
            return self._widened_product(rows, dtype)[None]
        sums = self._widened_product(rows.astype(x.dtype), jnp.dtype("float32"))
        y = sums.reshape(len(rows), -1) * x_scale[0, : len(rows), None]
        return y.astype(dtype).reshape(1, *x.shape[:-1], *self.out_shape)

    def _widened_product(self, x: Array, dtype: jnp.dtype) -> Array:
        """Reordered inputs: x is smaller than the weights."""
        ordered = kernel_order(x, self._x_bits) if self.reordered else x
        return input_last_product(ordered, self._as_stored(x.dtype), dtype)

    def _as_stored(self, dtype: jnp.dtype) -> Array:
        """``dense`` in the order of ``values``."""
        values, scale, zero = self._flat()
        if self.groups is None:
            weights = dequantized(values, scale, zero)
        else:
            zero = None if zero is None else zero[self.groups]
            weights = dequantized(values, scale[self.groups], zero)
        return weights.astype(dtype).reshape(self.values.shape)

    def _flat(self) -> tuple[Array, Array, Array | None]:
        """Values, scale and zero with all outputs in one dimension V: [V, in] and [n, V]."""
        values, scale = self.values, self.scale
        zero = None if self.zero is None else self.zero.reshape(len(scale), -1)
        return values.reshape(-1, values.shape[-1]), scale.reshape(len(scale), -1), zero

    def _runs_packed(self, x: Any, kernels: Kernels) -> bool:
        if "packed_product" not in kernels or not self.reordered:
            return False
        values, scale, zero = self._flat()
        if not self.rounds:
            return misfit(x.reshape(-1, x.shape[-1]), values, scale) is None
        if zero is not None or x.dtype != jnp.bfloat16:
            return False
        rows, (groups, width) = math.prod(x.shape[:-1]), scale.shape
        return sizes_misfit(rows, x.shape[-1], width, groups, weight_bits=4) is None


def grouped_shape(
    linear: Linear,
    num_groups: int,
    dtype: jnp.dtype,
    scale_dtype: jnp.dtype,
    *,
    zero: bool = False,
    mixed: bool = False,
    rounds: bool = False,
) -> GroupedLinear:
    """A GroupedLinear of ShapeDtypeStructs in place of a Linear of such.

    ``zero``, ``mixed`` and ``rounds``: whether it has zeros, groups in mixed order, and rounds its
    inputs.
    """
    size, *outputs = linear.weight.shape
    return GroupedLinear(
        values=array_shape(*outputs, size, dtype=dtype),
        scale=array_shape(num_groups, *outputs, dtype=scale_dtype),
        zero=array_shape(num_groups, *outputs, dtype=scale_dtype, when=zero),
        groups=array_shape(size, dtype=jnp.dtype("int32")) if mixed else None,
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
        rounds=rounds,
    )


def in_kernel_order(linear: GroupedLinear) -> GroupedLinear:
    """With values in the order in which kernels read them, if kernels can: 4 bits and groups of
    consecutive spans, so that devices that share the inputs have whole spans, too."""
    size, num_groups = linear.values.shape[-1], len(linear.scale)
    share = size // num_groups if num_groups > 1 else size // MOST_SHARES
    is_packed = linear.values.dtype == jnp.int4 and linear.groups is None
    if linear.reordered or not is_packed or size % num_groups or share % SPAN:
        return linear
    bits = 8 if linear.rounds else 16
    return linear.replace(values=kernel_order(linear.values, bits), reordered=True)


def rounded_to_groups(
    linear: Linear,
    bits: int = 4,
    group: int = 128,
    *,
    symmetric: bool = True,
    rounds: bool = False,
) -> GroupedLinear:
    """The nearest GroupedLinear with groups of consecutive inputs.

    Symmetric: the largest weight of each group is exact. Otherwise its smallest and its largest
    are, nearly, and groups have zeros. ``rounds``: whether the result rounds its inputs.

    Raises ValueError for inputs that are no multiple of ``group``.
    """
    weight = jnp.moveaxis(linear.weight.astype(jnp.float32), 0, -1)
    if weight.shape[-1] % group:
        raise ValueError(f"{weight.shape[-1]} inputs are no multiple of a group of {group}")
    by_group = weight.reshape(*weight.shape[:-1], -1, group)
    half, zero = 2 ** (bits - 1), None
    if symmetric:
        span = jnp.max(jnp.abs(by_group), axis=-1) / (half - 1)
    else:
        lowest, highest = (
            bound(by_group, axis=-1, initial=0.0) for bound in (jnp.min, jnp.max)
        )  # 0 stays exact
        span = (highest - lowest) / (2 * half - 1)
    scale = jnp.where(span > 0, span, 1.0).astype(linear.dtype)
    steps = by_group / scale[..., None].astype(jnp.float32)
    if not symmetric:
        zero = jnp.clip(jnp.round(-half - jnp.min(steps, axis=-1, initial=0.0)), -half, half - 1)
        steps = steps + zero[..., None]
    values = jnp.clip(jnp.round(steps), -half, half - 1).reshape(weight.shape)
    dtype = jnp.dtype("int4" if bits <= 4 else "int8")
    made = GroupedLinear(
        values=values.astype(dtype),
        scale=jnp.moveaxis(scale, -1, 0),
        zero=None if zero is None else jnp.moveaxis(zero, -1, 0).astype(scale.dtype),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
        rounds=rounds,
    )
    return in_kernel_order(made)
