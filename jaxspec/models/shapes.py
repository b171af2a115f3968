"""Shapes of weights that are not loaded yet."""

from typing import Any

import jax
import jax.numpy as jnp


def array_shape(*sizes: int, dtype: Any, when: bool = True) -> Any:
    """A ShapeDtypeStruct; None if ``when`` is False, for an array that the model does not have."""
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype)) if when else None


def vector(size: int, dtype: Any, *, when: bool = True) -> Any:
    """The shape of a norm's weight."""
    return array_shape(size, dtype=dtype, when=when)


def weight_name(path: tuple[Any, ...]) -> str:
    """The field name of a leaf at ``path`` in a pytree of weights; for a Linear's ``weight``, the
    name of the Linear's field."""
    names = [part.name for part in path if hasattr(part, "name")]
    return names[-2] if names[-1] == "weight" else names[-1]
