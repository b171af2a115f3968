"""How weights of o_gate_up_down, and the rows that they multiply, are stored in shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import FLOAT8
from pallas_kernels.o_gate_up_down import float8_products, products
from pallas_kernels.o_gate_up_down.weights import PackedWeights


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of a layer's weights.

    Attributes:
      dtype, row_dtype: of weights, and of rows.
      transforms, row_transforms: of both in shared memory.
      factors: arrays of which each block of weights has a part.
      add_block: multiplies a block, in one warpgroup; see products.add_block.
      by_group: whether rounded rows have a scale for each group of inputs.
    """

    dtype: jnp.dtype
    row_dtype: jnp.dtype
    transforms: tuple[Any, ...]
    row_transforms: tuple[Any, ...]
    factors: tuple[str, ...]
    add_block: Callable[..., Array]
    by_group: bool = False

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded to 8-bit floats."""
        return self.row_dtype == FLOAT8

    @property
    def scales_sums(self) -> bool:
        """Whether a scale of a row and one of an output multiply whole sums."""
        return self.rounds and not self.by_group


_INT4 = Format(
    jnp.dtype("int4"),
    jnp.dtype("bfloat16"),
    products.WEIGHT_TRANSFORMS,
    products.X_TRANSFORMS,
    ("scale", "zero"),
    products.add_block,
)
_FLOAT8 = Format(
    jnp.dtype(FLOAT8),
    jnp.dtype(FLOAT8),
    float8_products.TRANSFORMS,
    float8_products.TRANSFORMS,
    (),
    float8_products.add_block,
)
_FLOAT8_GROUPS = dataclasses.replace(
    _FLOAT8, factors=("scale",), add_block=float8_products.add_scaled_block, by_group=True
)


def format_of(weights: PackedWeights) -> Format:
    """The format of weights that the kernel takes."""
    if weights.values.dtype == _INT4.dtype:
        return _INT4
    return _FLOAT8 if len(weights.scale) == 1 else _FLOAT8_GROUPS
