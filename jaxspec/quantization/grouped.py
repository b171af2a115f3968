"""Weights of 4 or 8 bits whose scales are shared by groups of inputs: w = (value - zero) * scale.

The format of AWQ, GPTQ and rounding to nearest (see formats/ for their files). Activations stay as
they are.
"""

import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear, Product
from jaxspec.models.shapes import array_shape
from jaxspec.pytree import Pytree, array, pytree, static
from jaxspec.tensors import Filler, OutputsFirst, Source
from pallas_kernels.products import input_last_product
from pallas_kernels.selection import NO_KERNELS, Kernels


@pytree
class GroupedLinear(Pytree):
    """A Linear of the AnyLinear protocol. Arrays hold the input last, as kernels read weights.

    Attributes:
      values: int4 or int8 [*out, in].
      scale: float [*out, n] of n groups.
      zero: as ``values``, [*out, n]; None: all 0.
      groups: int32 [in], the group of each input; None: they follow each other, in / n inputs each.
      activations: the dtype of inputs and outputs.
    """

    values: Array = array()
    scale: Array = array()
    zero: Array | None = array(default=None)
    groups: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [*out]
    axes: tuple[str, ...] = static()
    activations: jnp.dtype = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        size, *outputs = self.axes
        by_group = (*outputs, size if self.groups is None and self.scale.shape[-1] > 1 else "group")
        return {
            "values": (*outputs, size),
            "scale": by_group,
            "zero": by_group,
            "groups": (size,),
            "bias": tuple(outputs),
        }

    @property
    def dtype(self) -> jnp.dtype:
        return self.activations

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.values.shape[:-1]

    def __call__(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        [y] = self.partial_sums(x, 1, kernels)
        return y if self.bias is None else y + self.bias

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        y = input_last_product(x, self.dense(x.dtype), jnp.float32)
        return y if self.bias is None else y + self.bias

    def filled(self, source: Source, filler: Filler) -> "GroupedLinear":
        own = OutputsFirst(source)
        return self.replace(
            values=filler.of_source(own, "values", self.values),
            scale=filler.of_source(own, "scale", self.scale),
            zero=filler.of_source(own, "zero", self.zero),
            groups=filler.array(f"{source.names[0]}.groups", self.groups),
            bias=filler.of_source(source, "bias", self.bias),
        )

    def product(self, x: Array, scope: str) -> Product:
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        return input_last_product(x, self.dense(x.dtype), x.dtype)[None]

    def best_num_splits(self, x: Array) -> int:
        return 1

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], computed in float32 and rounded to ``dtype``."""
        return dequantized(self.values, self.scale, self.zero, self.groups).astype(dtype)


def grouped_shape(
    linear: Linear,
    num_groups: int,
    dtype: jnp.dtype,
    scale_dtype: jnp.dtype,
    *,
    zero: bool = False,
    mixed: bool = False,
) -> GroupedLinear:
    """A GroupedLinear of ShapeDtypeStructs in place of a Linear of such.

    ``zero`` and ``mixed``: whether it has zeros, and groups in mixed order.
    """
    size, *outputs = linear.weight.shape
    by_group = (*outputs, num_groups)
    return GroupedLinear(
        values=array_shape(*outputs, size, dtype=dtype),
        scale=array_shape(*by_group, dtype=scale_dtype),
        zero=array_shape(*by_group, dtype=dtype) if zero else None,
        groups=array_shape(size, dtype=jnp.dtype("int32")) if mixed else None,
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def rounded_to_groups(
    linear: Linear, bits: int = 4, group: int = 128, *, symmetric: bool = True
) -> GroupedLinear:
    """The nearest GroupedLinear with groups of consecutive inputs.

    Symmetric: the largest weight of each group is exact. Otherwise its smallest and its largest
    are, nearly, and groups have zeros.

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
    return GroupedLinear(
        values=values.astype(dtype),
        scale=scale,
        zero=None if zero is None else zero.astype(dtype),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def dequantized(
    values: Array, scale: Array, zero: Array | None = None, groups: Array | None = None
) -> Array:
    """Float32 weights [*out, in] of a GroupedLinear's arrays."""
    integers, scale = values.astype(jnp.float32), scale.astype(jnp.float32)
    zero = jnp.zeros_like(scale) if zero is None else zero.astype(jnp.float32)
    if groups is not None:
        return (integers - jnp.take(zero, groups, axis=-1)) * jnp.take(scale, groups, axis=-1)
    by_group = integers.reshape(*scale.shape, -1)
    return ((by_group - zero[..., None]) * scale[..., None]).reshape(values.shape)
