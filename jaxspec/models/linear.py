"""Linear projections: shape, logical axes, bias, and the product itself.

A quantized format is a class in its own file with the same methods (see AnyLinear). It replaces
Linear when its checkpoint is loaded (see safetensors_io.load_decoder).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.tensors import Source, TensorMap
from jaxspec.parallel import UNSPLIT, Axes, Layout
from jaxspec.parallel.collectives import all_gather, all_reduce, all_tokens, reduce_scatter
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.products import einsum_f32, precision_of, split_k_product
from pallas_kernels.selection import NO_KERNELS, Kernels
from pallas_kernels.split_k import choose_split_k


class AnyLinear(Protocol):
    """A frozen pytree of one projection's weights, in any format.

    Model code calls it, or its ``product``; the other methods are for Product. ``kernels`` lists
    the operations that may run as kernels: a format with a kernel looks for its name there.
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axes: the input's, then the output's."""
        ...

    @property
    def bias(self) -> Array | None:
        """[*out]"""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of each field, for partition specs."""
        ...

    def __call__(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """x [..., in] -> [..., *out] in x's dtype. The input must not be split over devices: hidden
        states may be, in layers; see Product.result."""
        ...

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """x [..., in] -> float32 [..., *out]: for logits."""
        ...

    def product(self, x: Array, scope: str) -> "Product":
        """x [..., in] times the weight, not computed yet (see Product); ``scope`` is its name in
        profiles."""
        ...

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        """Split-K partial sums of the product, without the bias: [S, ..., *out].

        With ``num_splits`` 1 this is the product itself, in x's dtype. Otherwise the partial sums
        are float32, and rows past x's are padding (see products.split_k_product).
        """
        ...

    def best_num_splits(self, x: Array, kernels: Kernels) -> int:
        """The fastest number of split-K partial sums for x, if the consumer adds them up and these
        kernels may run."""
        ...

    def mapped(self, source: Source, tensor_map: TensorMap) -> Any:
        """The same, with every array replaced by ``tensor_map``'s result for ``source``."""
        ...


@runtime_checkable
class ReadsRounded(Protocol):
    """An AnyLinear that can round its inputs to 8-bit floats. If it does, its methods may take
    RoundedRows in place of an array x."""

    @property
    def rounds(self) -> bool:
        """Whether it rounds its inputs."""
        ...

    def reads_rounded(self, dtype: jnp.dtype, kernels: Kernels, num_groups: int = 1) -> bool:
        """Whether it takes rows of this dtype as RoundedRows, with scales for so many groups of
        consecutive inputs, if these kernels may run."""
        ...


@pytree
class RoundedRows(Pytree):
    """Activations of 8-bit floats: values * scale, where each token has a scale, or one for each
    of n groups of consecutive inputs (see round_tokens).

    Attributes:
      plain: what they were rounded from, if others read that; None: nobody does.
      dtype: that of ``plain``.
    """

    values: Array = array()  # e4m3 [B, T, H]
    scale: Array = array()  # [n, P], P >= B * T
    plain: Array | None = array(default=None)  # [B, T, H]
    dtype: jnp.dtype = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@pytree
class Linear(Pytree):
    """y = x W + b over the last dimension of x; the output may have several dimensions.

    ``axes``: logical names of the weight's dimensions, the input first (see parallel/layout.py).
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

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        return self._with_bias(einsum_f32("...h,hv->...v", x, self.weight))

    def mapped(self, source: Source, tensor_map: TensorMap) -> "Linear":
        return self.replace(
            weight=tensor_map.of_source(source, "weight", self.weight),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )

    def product(self, x: Array, scope: str) -> "Product":
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        return (
            self._multiply(x)[None]
            if num_splits == 1
            else split_k_product(x, self.weight, num_splits)
        )

    def best_num_splits(self, x: Array, kernels: Kernels) -> int:
        rows, depth = math.prod(x.shape[:-1]), self.in_size
        return choose_split_k(rows, depth, math.prod(self.out_shape))

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], for products that are no ``x W``: latent attention's."""
        return jnp.moveaxis(self.weight, 0, -1).astype(dtype)

    def _multiply(self, x: Array) -> Array:
        precision = precision_of(x.dtype, self.weight.dtype)
        return jnp.tensordot(x, self.weight, axes=1, precision=precision)

    def _with_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias


class Addend(Protocol):
    """What a mixer or an MLP adds to the residual stream, possibly as partial sums."""

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """Partial sums [S, B, T, H], each already summed over devices; see Product."""
        ...


@dataclasses.dataclass(frozen=True)
class Computed:
    """An Addend that is computed already: [B, T, H], split as the layout splits hidden states."""

    value: Array

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        return self.value[None]


@dataclasses.dataclass(frozen=True)
class ChosenSum:
    """An Addend of weighted products of chosen experts, on one device, which are not added up yet:
    a norm that follows does it. ``like``: [B, T, H], an array of its shape and dtype."""

    products: ChosenProducts
    like: Array

    @property
    def row(self) -> tuple[jnp.dtype, int]:
        """Dtype and width of a row."""
        return self.like.dtype, self.like.shape[-1]

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        total = self.products.total().astype(self.like.dtype)
        return total.reshape(1, *self.like.shape)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product that is not computed yet, so that its consumer can choose split-K.

    Some kernels add up split-K partial sums while they read them, which saves a launch.
    """

    linear: AnyLinear
    x: Any  # an array; or RoundedRows, if the linear reads them
    scope: str

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """Split-K partial sums of the product, bias included: [S, ..., *out].

        ``takes_partials(dtype, width)`` says whether the consumer adds up float32 partial sums of
        an output whose last dimension is ``width``. If it does not, S is 1 and the dtype is x's.
        The result is summed over the devices that the weight's input is split over. It is split as
        the layout splits such activations, and its tokens as ``layout.tokens`` says.
        """
        ways, bias = layout.product(self.linear.axes), self.linear.bias
        _, *outputs = layout.splits(self.linear.axes)
        with jax.named_scope(self.scope):
            x = all_tokens(self.x, _among(layout.tokens, *outputs))
            whole = dataclasses.replace(self, x=all_gather(x, ways.gathered))
        is_split = bool(ways.summed or ways.scattered)
        partials = whole.local_sums(kernels, takes_none if is_split else takes_partials)
        with jax.named_scope(self.scope):
            first = partials.ndim - len(self.linear.out_shape)  # dimension of the output
            partials = reduce_scatter(partials, ways.scattered, first + ways.dimension)
            over = _among(layout.tokens, ways.summed)
            partials = reduce_scatter(partials, over, first - 1)
            partials = all_reduce(partials, tuple(a for a in ways.summed if a not in over))
            return partials if bias is None else partials + bias

    def result(self, layout: Layout, kernels: Kernels) -> Array:
        """The product itself [..., *out], bias included, in x's dtype."""
        if layout.product(self.linear.axes) == UNSPLIT and not layout.tokens:
            return self.linear(self.x, kernels)
        return self.partial_sums(layout, kernels, takes_none)[0]

    def local_sums(
        self, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """``partial_sums`` of this device's part of the product, and without the bias."""
        linear = self.linear
        with jax.named_scope(self.scope):
            can_split = linear.bias is None
            can_split = can_split and takes_partials(self.x.dtype, linear.out_shape[-1])
            num_splits = linear.best_num_splits(self.x, kernels) if can_split else 1
            return linear.partial_sums(self.x, num_splits, kernels)

    def input_axes(self, layout: Layout) -> Axes:
        """Mesh axes that the weight's input is split over: the product must be summed over them."""
        return layout.splits(self.linear.axes)[0]


def _among(tokens: Axes, *splits: Axes) -> Axes:
    """The mesh axes of ``splits`` that tokens are split over."""
    return tuple(axis for axes in splits for axis in axes if axis in tokens)


def takes_none(dtype: jnp.dtype, width: int) -> bool:
    """What a consumer says that adds up no partial sums; see Product.partial_sums."""
    return False


def linear_shape(
    axes: tuple[str, ...], sizes: tuple[int, ...], dtype: jnp.dtype, *, bias: bool = False
) -> Linear:
    """A Linear of ShapeDtypeStructs; ``axes`` and ``sizes`` are the input's, then the output's."""

    def shape(dims: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    return Linear(weight=shape(sizes), bias=shape(sizes[1:]) if bias else None, axes=axes)
