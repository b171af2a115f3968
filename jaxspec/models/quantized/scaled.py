"""Weights of 8-bit integers with a scale for each output."""

import math

import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear, Product
from jaxspec.models.mlps.expert_linear import check_no_experts
from jaxspec.models.nodes import map_nodes
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32, split_k_product
from pallas_kernels.selection import NO_KERNELS, Kernels
from pallas_kernels.split_k import choose_split_k

LARGEST = 127  # -128 is not used: values are symmetric
# With more rows, widening integers takes a GPU longer than reading weights of twice their size.
MOST_ROWS = 48


@pytree
class ScaledLinear(Pytree):
    """y = (x W) * scale + b: a Linear of the AnyLinear protocol that reads half as many bytes.

    The product is one of x's dtype: XLA widens the integers within its matrix product on a GPU.

    Attributes:
      loaded: the weights before they were rounded, for inputs of more than MOST_ROWS rows; None:
        these take the integers, too.
      activations: the dtype of inputs and outputs.
    """

    weight: Array = array()  # int8 [in, *out]
    scale: Array = array()  # float32 [*out]
    bias: Array | None = array(default=None)  # [*out]
    loaded: Linear | None = None
    axes: tuple[str, ...] = static()
    activations: jnp.dtype = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": self.axes, "scale": self.axes[1:], "bias": self.axes[1:]}

    @property
    def dtype(self) -> jnp.dtype:
        return self.activations

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.weight.shape[1:]

    def __call__(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        other = self._for_many(x)
        return self._with_bias(self._multiply(x)) if other is None else other(x, kernels)

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        if (other := self._for_many(x)) is not None:
            return other.float32(x, kernels)
        return self._with_bias(einsum_f32("...h,hv->...v", x, self._wide(x)) * self.scale)

    def mapped(self, source: Source, tensor_map: TensorMap) -> "ScaledLinear":
        return self.replace(
            weight=tensor_map.of_source(source, "weight", self.weight),
            scale=tensor_map.of_source(source, "weight_scale", self.scale),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )

    def product(self, x: Array, scope: str) -> Product:
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        if (other := self._for_many(x)) is not None:
            return other.partial_sums(x, num_splits, kernels)
        if num_splits == 1:
            return self._multiply(x)[None]
        return split_k_product(x, self._wide(x), num_splits) * self.scale

    def best_num_splits(self, x: Array, kernels: Kernels) -> int:
        rows, depth = math.prod(x.shape[:-1]), len(self.weight)
        return choose_split_k(rows, depth, math.prod(self.out_shape))

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], computed in float32 and rounded to ``dtype``."""
        return jnp.moveaxis(self.weight * self.scale, 0, -1).astype(dtype)

    def _for_many(self, x: Array) -> Linear | None:
        return self.loaded if math.prod(x.shape[:-1]) > MOST_ROWS else None

    def _wide(self, x: Array) -> Array:
        return self.weight.astype(x.dtype)  # exact, also in bfloat16

    def _multiply(self, x: Array) -> Array:
        weight = self._wide(x).reshape(len(self.weight), -1)
        product = einsum_f32("...h,hv->...v", x, weight).reshape(*x.shape[:-1], *self.out_shape)
        return (product * self.scale).astype(x.dtype)

    def _with_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias


def in_eight_bits[T](weights: T) -> T:
    """A pytree of weights with every Linear replaced by the nearest ScaledLinear, beside it.

    Raises ValueError for weights with experts.
    """
    check_no_experts(weights, "quantized")
    return map_nodes(weights, lambda node: rounded_to_nearest(node).replace(loaded=node), Linear)


def only_eight_bits[T](weights: T) -> T:
    """The same without what is kept for many rows."""
    return map_nodes(weights, lambda node: node.replace(loaded=None), ScaledLinear)


def rounded_to_nearest(linear: Linear) -> ScaledLinear:
    """The nearest ScaledLinear whose largest weight of each output is exact."""
    weight = linear.weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=0)
    scale = jnp.where(largest > 0, largest, 1.0) / LARGEST
    return ScaledLinear(
        weight=jnp.round(weight / scale).astype(jnp.int8),
        scale=scale,
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )
