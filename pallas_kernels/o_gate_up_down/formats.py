"""How weights of o_gate_up_down, and the rows that they multiply, are stored in shared memory."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import FLOAT8
from pallas_kernels.o_gate_up_down import float8_products, products


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of a layer's weights.

    Attributes:
      dtype, row_dtype: of weights, and of rows.
      transforms, row_transforms: of both in shared memory.
      factors: arrays of which each block of weights has a part.
      add_block: multiplies a block, in one warpgroup; see products.add_block.
    """

    dtype: jnp.dtype
    row_dtype: jnp.dtype
    transforms: tuple[Any, ...]
    row_transforms: tuple[Any, ...]
    factors: tuple[str, ...]
    add_block: Callable[..., Array]

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded to 8-bit floats. Their scales, and those of outputs, multiply
        whole sums."""
        return self.row_dtype == FLOAT8


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
FORMATS: Mapping[jnp.dtype, Format] = MappingProxyType({f.dtype: f for f in (_INT4, _FLOAT8)})
