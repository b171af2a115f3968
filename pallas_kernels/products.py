"""Products that accumulate and return float32 on every backend."""

import jax
import jax.numpy as jnp
from jax import Array


def einsum_f32(subscripts: str, x: Array, y: Array) -> Array:
    """``jnp.einsum`` of two operands with a float32 result.

    XLA's CPU backend has no bfloat16 product with a float32 result, so there the operands are
    widened first; elsewhere they are multiplied as they are.
    """

    def native(x: Array, y: Array) -> Array:
        return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)

    def widened(x: Array, y: Array) -> Array:
        return jnp.einsum(subscripts, x.astype(jnp.float32), y.astype(jnp.float32))

    if x.dtype == y.dtype == jnp.float32:
        return native(x, y)
    return jax.lax.platform_dependent(x, y, cpu=widened, default=native)
