"""Weights and activations of 8-bit floats (e4m3): their products are those that tensor cores have.

Weights have a scale for each output, or for each output and 128 inputs. Activations are rounded
when they are used, with a scale for each token, or for each token and as many inputs.
"""

import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear, Product
from jaxspec.models.shapes import array_shape
from jaxspec.pytree import Pytree, array, pytree, static
from jaxspec.tensors import Filler, OutputsFirst, Source
from pallas_kernels.packed_product.reference import dequantized
from pallas_kernels.products import input_last_product
from pallas_kernels.selection import NO_KERNELS, Kernels

E4M3 = jnp.dtype("float8_e4m3fn")
LARGEST = float(jnp.finfo(E4M3).max)  # 448


@pytree
class Float8Linear(Pytree):
    """A Linear of the AnyLinear protocol. Arrays hold the input last, as tensor cores read weights.

    Attributes:
      values: e4m3 [*out, in].
      scale: float [n, *out] of n groups of consecutive inputs.
      activations: the dtype of inputs and outputs.
    """

    values: Array = array()
    scale: Array = array()
    bias: Array | None = array(default=None)  # [*out]
    axes: tuple[str, ...] = static()
    activations: jnp.dtype = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        size, *outputs = self.axes
        by_group = (size if len(self.scale) > 1 else "group", *outputs)
        return {"values": (*outputs, size), "scale": by_group, "bias": tuple(outputs)}

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
        y = self._multiply(x)
        return y if self.bias is None else y + self.bias

    def filled(self, source: Source, filler: Filler) -> "Float8Linear":
        return self.replace(
            values=filler.of_source(OutputsFirst(source), "values", self.values),
            scale=filler.of_source(source, "scale", self.scale),
            bias=filler.of_source(source, "bias", self.bias),
        )

    def product(self, x: Array, scope: str) -> Product:
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        return self._multiply(x).astype(x.dtype)[None]

    def best_num_splits(self, x: Array, kernels: Kernels) -> int:
        return 1

    def _multiply(self, x: Array) -> Array:
        """x [..., in] -> float32 [..., *out]."""
        num_groups = len(self.scale)
        rounded, x_scale = round_tokens(x, num_groups)
        if num_groups > 1:
            return self._multiply_groups(rounded, x_scale, x.dtype)
        y = input_last_product(rounded, self.values, jnp.float32)
        x_scale = x_scale.reshape(*x_scale.shape[:-1], *(1,) * len(self.out_shape))
        return y * x_scale * self.scale[0].astype(jnp.float32)

    def _multiply_groups(self, rounded: Array, x_scale: Array, dtype: jnp.dtype) -> Array:
        """Products of several groups have several scales: both sides are widened before."""
        x = rounded.astype(jnp.float32).reshape(*x_scale.shape, -1) * x_scale[..., None]
        depth, num_groups = self.values.shape[-1], len(self.scale)
        flat = dequantized(self.values.reshape(-1, depth), self.scale.reshape(num_groups, -1))
        x, weight = x.reshape(rounded.shape), flat.reshape(self.values.shape)
        return input_last_product(x.astype(dtype), weight.astype(dtype), jnp.float32)


def float8_shape(linear: Linear, num_groups: int, scale_dtype: jnp.dtype) -> Float8Linear:
    """A Float8Linear of ShapeDtypeStructs in place of a Linear of such."""
    size, *outputs = linear.weight.shape
    return Float8Linear(
        values=array_shape(*outputs, size, dtype=E4M3),
        scale=array_shape(num_groups, *outputs, dtype=scale_dtype),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def rounded_to_float8(linear: Linear, num_groups: int = 1) -> Float8Linear:
    """The nearest Float8Linear: the largest weight of each group becomes 448."""
    weight = jnp.moveaxis(linear.weight, 0, -1)
    values, scale = round_tokens(weight, num_groups)
    return Float8Linear(
        values=values,
        scale=jnp.moveaxis(scale, -1, 0),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def round_tokens(x: Array, num_groups: int = 1) -> tuple[Array, Array]:
    """x [..., in] as e4m3 [..., in] and float32 scales [..., num_groups]: the largest entry of each
    group of consecutive inputs becomes 448. Their product is x, rounded."""
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], num_groups, -1)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scale = jnp.where(largest > 0, largest, 1.0) / LARGEST
    rounded = jnp.clip(groups / scale[..., None], -LARGEST, LARGEST).astype(E4M3)
    return rounded.reshape(x.shape), scale
