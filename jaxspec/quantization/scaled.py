"""Weights of 8 bits with a scale for each output: integers, or floating-point numbers (e4m3)."""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear, Product
from jaxspec.pytree import Pytree, array, pytree, static
from jaxspec.tensors import Filler, Source
from pallas_kernels.products import einsum_f32, split_k_product
from pallas_kernels.selection import NO_KERNELS, Kernels
from pallas_kernels.split_k import choose_split_k

EightBits = Literal["int8", "fp8"]
FORMATS: tuple[EightBits, ...] = get_args(EightBits)

LARGEST_INTEGER = 127  # -128 is not used: values are symmetric
E4M3 = jnp.float8_e4m3fn
LARGEST_E4M3 = float(jnp.finfo(E4M3).max)  # 448; what is larger would become NaN


@pytree
class ScaledLinear(Pytree):
    """y = (x W) * scale + b: a Linear of the AnyLinear protocol in half of bfloat16's memory.

    Integers: the product is one of x's dtype. XLA widens the weights within its matrix product on a
    GPU, so that half as many bytes are read, but for many rows widening takes longer than reading.

    Floating-point numbers: x is rounded to e4m3 too, with a scale for each token, so that the
    product is one of 8 bits ("channel x dynamic token", as compressed-tensors names it).

    Attributes:
      activations: the dtype of inputs and outputs.
    """

    weight: Array = array()  # int8 or float8_e4m3fn [in, *out]
    scale: Array = array()  # float32 [*out]
    bias: Array | None = array(default=None)  # [*out]
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
        return self._with_bias(self._multiply(x))

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        return self._with_bias(self._product(x))

    def filled(self, source: Source, filler: Filler) -> "ScaledLinear":
        return self.replace(
            weight=filler.of_source(source, "weight", self.weight),
            scale=filler.of_source(source, "weight_scale", self.scale),
            bias=filler.of_source(source, "bias", self.bias),
        )

    def product(self, x: Array, scope: str) -> Product:
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        if num_splits == 1 or not self._is_integer:
            return self._multiply(x)[None]
        return split_k_product(x, self.weight.astype(x.dtype), num_splits) * self.scale

    def best_num_splits(self, x: Array) -> int:
        if not self._is_integer:
            return 1
        rows, depth = math.prod(x.shape[:-1]), len(self.weight)
        return choose_split_k(rows, depth, math.prod(self.out_shape))

    @property
    def _is_integer(self) -> bool:
        return self.weight.dtype == jnp.int8

    def _multiply(self, x: Array) -> Array:
        return self._product(x).astype(x.dtype)

    def _product(self, x: Array) -> Array:
        """float32 [..., *out]"""
        flat = self.weight.reshape(len(self.weight), -1)
        if self._is_integer:  # exact in x's dtype, also if that is bfloat16
            product = einsum_f32("...h,hv->...v", x, flat.astype(x.dtype))
        else:
            rounded, steps = in_e4m3(x)
            product = einsum_f32("...h,hv->...v", rounded, flat) * steps
        return product.reshape(*x.shape[:-1], *self.out_shape) * self.scale

    def _with_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias


def in_e4m3(x: Array) -> tuple[Array, Array]:
    """Each token's entries by its largest one: float8_e4m3fn [..., in] and float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    steps = jnp.where(largest > 0, largest, 1.0) / LARGEST_E4M3
    return _e4m3(wide / steps), steps


def in_eight_bits[T](weights: T, kind: EightBits = "int8") -> T:
    """A pytree of weights with every Linear replaced by the nearest ScaledLinear."""
    return jax.tree.map(
        lambda node: rounded_to_nearest(node, kind) if isinstance(node, Linear) else node,
        weights,
        is_leaf=lambda node: isinstance(node, Linear),
    )


def rounded_to_nearest(linear: Linear, kind: EightBits = "int8") -> ScaledLinear:
    """The nearest ScaledLinear whose largest weight of each output is exact.

    Raises ValueError for an unknown kind.
    """
    if kind not in FORMATS:
        raise ValueError(f"weights of 8 bits are one of {', '.join(FORMATS)}, got {kind!r}")
    weight = linear.weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=0)
    most = LARGEST_INTEGER if kind == "int8" else LARGEST_E4M3
    scale = jnp.where(largest > 0, largest, 1.0) / most
    steps = weight / scale
    return ScaledLinear(
        weight=jnp.round(steps).astype(jnp.int8) if kind == "int8" else _e4m3(steps),
        scale=scale,
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def _e4m3(x: Array) -> Array:
    return jnp.clip(x, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3)
