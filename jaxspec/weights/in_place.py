"""Weights that take the place of others on the devices."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.weight_places import weight_place


def committed(leaf: Any) -> jax.Array:
    """The array, committed to the devices that it is on."""
    array = jnp.asarray(leaf)
    return jax.device_put(array, place_of(array))


def in_place_of(current: Any, new: Any) -> Any:
    """``new`` where ``current`` lies, if their structure and shapes are the same."""
    if _shapes(new) != _shapes(current):
        raise ValueError(
            "the weights have other shapes or static fields than those in use: make a new engine "
            "with them instead"
        )
    return jax.device_put(new, jax.tree.map(place_of, current))


def place_of(leaf: jax.Array) -> Any:
    """Where a weight lies: see weight_places.weight_place."""
    return weight_place(leaf.shape, leaf.sharding)


def _shapes(tree: Any) -> tuple[Any, list[Any]]:
    """The structure of a tree, with the shape and dtype of each leaf; None of what is no array."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves
    ]
