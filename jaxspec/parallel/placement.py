"""Weights that take the place of others on the devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config.checks import first_of
from jaxspec.parallel.memory_format import weight_place
from jaxspec.parallel.moving import moved
from jaxspec.parallel.pytree import array_text, is_static

MOST_SHOWN = 4  # differences that an error lists


def committed(leaf: Any) -> jax.Array:
    """The array, committed to the devices that it is on."""
    array = jnp.asarray(leaf)
    return jax.device_put(array, place_of(array))


def committed_beside(weights: Any, state: Any) -> Any:
    """``state``, with each leaf committed: what does not lie on purpose anywhere, such as a count,
    goes to all devices of the weights. A step gives back committed arrays, and a program is
    compiled again for arguments that differ in that alone."""
    place = jax.tree.leaves(weights)[0].sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, place), state)


def in_place_of(current: Any, new: Any) -> Any:
    """``new`` where ``current`` lies, if their structure and shapes are the same. From devices it
    does not pass through the host.

    Raises ValueError that names what differs.
    """
    if different := _differences(current, new):
        raise ValueError(
            "the weights have other shapes or static fields than those in use: "
            f"{first_of(different, MOST_SHOWN)}; make a new engine with them instead"
        )
    return jax.tree.map(lambda leaf, old: moved(leaf, place_of(old)), new, current)


def place_of(leaf: jax.Array) -> Any:
    """Where a weight lies: see memory_format.weight_place."""
    return weight_place(leaf.shape, leaf.sharding)


def _differences(current: Any, new: Any) -> list[str]:
    """What ``new`` has otherwise: arrays by name, or else kinds and static fields."""
    if type(new) is not type(current):
        return [f"{type(new).__name__} instead of {type(current).__name__}"]
    before, after = _shapes(current), _shapes(new)
    names = dict.fromkeys([*before, *after])
    found = [
        f"{name} is {after.get(name, 'missing')}, not {before.get(name, 'expected')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    if not found and jax.tree.structure(current) != jax.tree.structure(new):
        found = _static_differences(current, new) or ["kinds of layers or options"]
    return found


def _static_differences(current: Any, new: Any) -> list[str]:
    """Static fields of two dataclasses that differ, by name."""
    if not dataclasses.is_dataclass(current):
        return []
    return [
        field.name
        for field in dataclasses.fields(current)
        if is_static(field) and getattr(current, field.name) != getattr(new, field.name)
    ]


def _shapes(tree: Any) -> dict[str, str]:
    """The arrays by name, as ``int32[2, 3]``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path).lstrip("."): array_text(leaf) for path, leaf in leaves}
