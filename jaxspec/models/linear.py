"""The one weight type of products: its shape, logical axes and bias, and the product itself.

A quantized kind is a class in a file of its own with the same methods (see AnyLinear), put in the
place of a Linear when its checkpoint is loaded (see weights.safetensors_io.load_decoder).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.pytree import Pytree, array, pytree, static
from jaxspec.sharding import Axes, Layout
from jaxspec.tensors import Filler, Source
from pallas_kernels.products import einsum_f32, precision_of, product_parts
from pallas_kernels.selection import NO_KERNELS, Kernels
from pallas_kernels.split_k import choose_split_k


class AnyLinear(Protocol):
    """A frozen pytree of one projection's weights, whatever they are made of.

    Model code calls it, or asks for its ``product``. The rest is what a Product needs. ``kernels``:
    operations that may run as kernels; a kind with a kernel of its own looks there for its name.
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axes, the input first, then the output's."""
        ...

    @property
    def bias(self) -> Array | None:
        """[*out]"""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """Of the activations that it is made for."""
        ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of each field, for partition specs."""
        ...

    def __call__(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """x [..., in] -> [..., *out] in x's dtype. For an input that is not split over devices."""
        ...

    def float32(self, x: Array) -> Array:
        """x [..., in] -> float32 [..., *out]: for logits."""
        ...

    def product(self, x: Array, scope: str) -> "Product":
        """x [..., in] times the weight for a consumer that adds it up; ``scope`` names it in
        profiles."""
        ...

    def partial_sums(self, x: Array, num_parts: int, kernels: Kernels) -> Array:
        """The product without its bias, in parts over runs of its depth: [S, ..., *out].

        One part in x's dtype, several in float32; their rows past x's are padding.
        """
        ...

    def most_parts(self, x: Array) -> int:
        """Parts that a product with x takes the least time in, if its consumer adds them up."""
        ...

    def filled(self, source: Source, filler: Filler) -> Any:
        """The same with ``filler``'s result for ``source`` in place of every array."""
        ...


@pytree
class Linear(Pytree):
    """y = x W + b over the last dimension of x; the output may have several dimensions.

    ``axes``: logical names of the weight's dimensions, the input first (see sharding.py).
    """

    weight: Array = array()  # [in, *out]
    bias: Array | None = array(default=None)  # [*out]
    axes: tuple[str, ...] = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": self.axes, "bias": self.axes[1:]}

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    @property
    def in_size(self) -> int:
        return self.weight.shape[0]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.weight.shape[1:]

    def __call__(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        return self._with_bias(self._multiply(x))

    def float32(self, x: Array) -> Array:
        return self._with_bias(einsum_f32("...h,hv->...v", x, self.weight))

    def filled(self, source: Source, filler: Filler) -> "Linear":
        return self.replace(
            weight=filler.of_source(source, "weight", self.weight),
            bias=filler.of_source(source, "bias", self.bias),
        )

    def product(self, x: Array, scope: str) -> "Product":
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_parts: int, kernels: Kernels) -> Array:
        return (
            self._multiply(x)[None] if num_parts == 1 else product_parts(x, self.weight, num_parts)
        )

    def most_parts(self, x: Array) -> int:
        rows, depth = math.prod(x.shape[:-1]), self.in_size
        return choose_split_k(rows, depth, math.prod(self.out_shape))

    def _multiply(self, x: Array) -> Array:
        precision = precision_of(x.dtype, self.weight.dtype)
        return jnp.tensordot(x, self.weight, axes=1, precision=precision)

    def _with_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias


class Addend(Protocol):
    """What a mixer or an MLP adds to the residual stream, still in partial sums."""

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_parts: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """Parts [S, B, T, H] whose sum it is, summed over devices; see Product."""
        ...


@dataclasses.dataclass(frozen=True)
class Product:
    """A product that is not computed yet: its consumer says in how many partial sums it may come.

    Some kernels add partial sums up while they read them, which spares a launch (split-K).
    """

    linear: AnyLinear
    x: Array
    scope: str

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_parts: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """The product, bias included, in parts whose sum it is: [S, ..., *out].

        One part in x's dtype unless ``takes_parts`` (of its dtype and the last dimension) says that
        the consumer adds up several in float32. Summed over the devices that its input is split
        over.
        """
        linear, split = self.linear, self.input_axes(layout)
        with jax.named_scope(self.scope):
            whole = not split and linear.bias is None
            several = whole and takes_parts(self.x.dtype, linear.out_shape[-1])
            num_parts = linear.most_parts(self.x) if several else 1
            parts = linear.partial_sums(self.x, num_parts, kernels)
            if split:
                parts = jax.lax.psum(parts, split)
            return parts if linear.bias is None else parts + linear.bias

    def input_axes(self, layout: Layout) -> Axes:
        """Mesh axes that the product has still to be summed over."""
        return layout.axes(self.linear.axes[0])


def linear_shape(
    axes: tuple[str, ...], sizes: tuple[int, ...], dtype: jnp.dtype, *, bias: bool = False
) -> Linear:
    """A Linear of ShapeDtypeStructs: its logical axes and their sizes, the input first."""

    def shape(dims: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    return Linear(weight=shape(sizes), bias=shape(sizes[1:]) if bias else None, axes=axes)
