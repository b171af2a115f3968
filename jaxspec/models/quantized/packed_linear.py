"""What Linears share whose weights the kernel packed_product reads."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Product, RoundedRows
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.parallel.pytree import Pytree
from pallas_kernels.packed_product.tuning import choose_packed_splits, choose_splits_alone
from pallas_kernels.products import sum_partials
from pallas_kernels.round_tokens import round_tokens
from pallas_kernels.selection import NO_KERNELS, Kernels


class PackedLinear(Pytree):
    """Methods of the AnyLinear protocol, for weights that are stored with the input last.

    A subclass has the fields ``values`` [*out, in], ``bias``, ``axes`` and ``activations``.
    """

    values: Array
    bias: Array | None
    axes: tuple[str, ...]
    activations: jnp.dtype

    @property
    def dtype(self) -> jnp.dtype:
        return self.activations

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.values.shape[:-1]

    def __call__(self, x: Any, kernels: Kernels = NO_KERNELS) -> Array:
        sums = self.partial_sums(x, self._num_splits(choose_splits_alone, x, kernels), kernels)
        y = sum_partials(sums, sums.shape[1], x.dtype)
        return y if self.bias is None else y + self.bias

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        [y] = self._multiply(x, 1, kernels, jnp.dtype("float32"))
        return y if self.bias is None else y + self.bias

    def product(self, x: Array, scope: str) -> Product:
        return Product(self, x, scope)

    def partial_sums(self, x: Any, num_splits: int, kernels: Kernels) -> Array:
        dtype = x.dtype if num_splits == 1 else jnp.dtype("float32")
        return self._multiply(x, num_splits, kernels, dtype)

    def best_num_splits(self, x: Any, kernels: Kernels) -> int:
        return self._num_splits(choose_packed_splits, x, kernels)

    def _num_splits(self, choose: Callable[..., int], x: Any, kernels: Kernels) -> int:
        if not self._runs_packed(x, kernels):
            return 1
        rows, width = math.prod(x.shape[:-1]), math.prod(self.out_shape)
        return choose(rows, self.values.shape[-1], width, *self._bits)

    @abstractmethod
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """The logical axes of each array."""

    @abstractmethod
    def mapped(self, source: Source, tensor_map: TensorMap) -> Any:
        """The same, with every array replaced by ``tensor_map``'s result for ``source``."""

    @abstractmethod
    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], computed in float32 and rounded to ``dtype``."""

    @property
    @abstractmethod
    def _bits(self) -> tuple[int, int]:
        """Bits of a weight, and of the rows that are multiplied."""

    @abstractmethod
    def _runs_packed(self, x: Any, kernels: Kernels) -> bool:
        """Whether the kernel takes this product."""

    @abstractmethod
    def _multiply(self, x: Any, num_splits: int, kernels: Kernels, dtype: jnp.dtype) -> Array:
        """Multiplies x [..., in] by the weights: [S, ..., *out]; S is 1 where no kernel runs."""


def rounded_rows(x: Any, num_groups: int, kernels: Kernels) -> tuple[Array, Array]:
    """e4m3 rows [M, in] and their scales float32 [n, M or more] (see round_tokens).

    ``x``: [..., in], an array, or RoundedRows, which are rounded already.
    """
    if isinstance(x, RoundedRows):
        return x.values.reshape(-1, x.shape[-1]), x.scale
    rows = x.reshape(-1, x.shape[-1])
    return round_tokens(rows, num_groups, kernels.implementation("round_tokens"))
