"""What many parts give, one after the other, without memory for it before it is needed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun


def map_after(before: Array, function: Callable[[Any], Array], parts: Any) -> Array:
    """``lax.map(function, parts)``, whose result takes no memory before ``before`` is computed.

    What lax.map begins with is a constant, zeros, and XLA makes those of all layers of a model at
    once, before the first layer. So this begins with some number of ``before``, of which nothing
    stays.

    Args:
      before: [1 or more, ...], such as the rows that the function multiplies.
      parts: arrays [P, ...], P parts.
    """
    first = jax.tree.map(lambda array: array[0], parts)
    traced, shape = jax.make_jaxpr(function, return_shape=True)(first)  # once, as lax.map does
    number = lax.stop_gradient(before.reshape(-1)[0]).astype(shape.dtype)
    count = len(jax.tree.leaves(parts)[0])

    def fill(place: Array, found: Array) -> Array:
        part = [array[place] for array in jax.tree.leaves(parts)]
        return found.at[place].set(*jaxpr_as_fun(traced)(*part))

    return lax.fori_loop(0, count, fill, jnp.broadcast_to(number, (count, *shape.shape)))
