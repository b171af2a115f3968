"""What many parts give, one after the other, without memory for it before it is needed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun


def map_after(before: Array, function: Callable[[Any], Array], parts: Any) -> Array:
    """``lax.map(function, parts)``, whose result takes no memory before ``before`` is computed.

    What lax.map begins with is a constant, zeros, and XLA makes those of all layers of a model at
    once, before the first layer. So this begins with some number of ``before``, of which nothing
    stays. Where it is differentiated lax.map runs, whose gradient reads each part once.

    Args:
      before: [1 or more, ...], such as the rows that the function multiplies.
      parts: arrays [P, ...], one part or more.
    """
    leaves, structure = jax.tree.flatten(parts)
    shapes = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in leaves]
    traced, shape = jax.make_jaxpr(function, return_shape=True)(structure.unflatten(shapes))

    def of_part(consts: Sequence[Any], part: Sequence[Array]) -> Array:
        [found] = jaxpr_as_fun(traced.replace(consts=consts))(*part)
        return found

    def mapped(consts: Sequence[Any], leaves: Sequence[Array]) -> Array:
        return lax.map(lambda part: of_part(consts, part), leaves)

    @jax.custom_jvp
    def filled(consts: Sequence[Any], leaves: Sequence[Array], before: Array) -> Array:
        def fill(place: Array, found: Array) -> Array:
            return found.at[place].set(of_part(consts, [array[place] for array in leaves]))

        number = before.reshape(-1)[0].astype(shape.dtype)
        count = len(leaves[0])
        return lax.fori_loop(0, count, fill, jnp.broadcast_to(number, (count, *shape.shape)))

    @filled.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        return jax.jvp(mapped, primals[:2], tangents[:2])

    return filled(traced.consts, leaves, before)
