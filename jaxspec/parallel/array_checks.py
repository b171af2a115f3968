"""Checks of arrays that callers give: every fault is told, in their words.

Shapes and dtypes are always checked, values where they are known: not in a caller's ``jit``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxspec.config.checks import Problems, is_integer

type Lists = Sequence[int] | Sequence[Lists]
Integers = ArrayLike | Lists  # an array or lists of integers

INT32 = np.iinfo(np.int32)


class ArrayProblems(Problems):
    """What is wrong with the arguments of a call."""

    def whole(self, name: str, value: Any, least: int, cure: str = "") -> None:
        """``value`` must be an int of at least ``least``."""
        if is_integer(value) and value >= least:
            return
        self.add(f"{name} must be an int, at least {least}{cure}, got {value!r}")

    def integers(self, name: str, value: Integers, shape: str) -> Array | np.ndarray:
        """``value`` as an array, which must be of integers of 32 bits, and of so many dimensions as
        ``shape``, such as "[B, T]"."""
        dims = 0 if shape == "[]" else shape.count(",") + 1
        wanted = f"{name} must be " + (f"integers {shape}" if dims else "an integer")
        try:
            array = as_array(value)
        except (ValueError, TypeError):  # lists of several lengths
            self.add(f"{wanted}: pad its lists to one length")
            return np.zeros(0, np.int32)
        if not isinstance(array, Array) and array.size == 0:
            array = array.astype(np.int32)  # an empty list has no dtype
        if not jnp.issubdtype(array.dtype, jnp.integer):
            self.add(f"{wanted}, not {array.dtype}: cast it")
        elif array.ndim != dims:
            cure = f": give [{name}]" if array.ndim == dims - 1 else ""
            self.add(f"{wanted}, got shape {list(array.shape)}{cure}")
        else:
            in_32_bits = "it does not fit 32 bits"
            self.within(name, array, lambda x: (x >= INT32.min) & (x <= INT32.max), in_32_bits)
        return array

    def within(self, name: str, value: Any, is_ok: Callable[[np.ndarray], Any], rule: str) -> None:
        """Each entry of ``value``, if it is known, must be ``is_ok``."""
        values = known(value)
        if values is None:
            return
        wrong = np.argwhere(~np.broadcast_to(is_ok(values), values.shape))
        if len(wrong):
            place = tuple(wrong[0].tolist())
            index = f"[{', '.join(map(str, place))}]" if place else ""
            self.add(f"{name}{index} is {values[place]}: {rule}")


def known(value: Any) -> np.ndarray | None:
    """The values of an array or a list; None if they are traced, or on other processes' devices."""
    value = as_array(value)
    if isinstance(value, Tracer) or (isinstance(value, Array) and not value.is_fully_addressable):
        return None
    return np.asarray(value)


def as_array(value: Any) -> Array | np.ndarray:
    """An array, or a list of numbers, arrays or traced values, as an array."""
    if isinstance(value, Array | np.ndarray):
        return value
    holds_arrays = any(isinstance(leaf, Array) for leaf in jax.tree.leaves(value))
    return jnp.asarray(value) if holds_arrays else np.asarray(value)


def integers(name: str, value: Integers, shape: str) -> Array | np.ndarray:
    """The integers of an array or a list; see ArrayProblems.integers.

    Raises ValueError for other dtypes and numbers of dimensions, and for integers past 32 bits.
    """
    problems = ArrayProblems()
    array = problems.integers(name, value, shape)
    problems.raise_all()
    return array


def as_int32(name: str, value: Integers, shape: str) -> Array:
    """The same as int32, on the device."""
    return jnp.asarray(integers(name, value, shape), jnp.int32)


def checked_texts(
    vocab_size: int, least: int = 0, /, lengths: Integers | None = None, **texts: Integers
) -> tuple[Array, Array | None]:
    """Texts [B, T] and their lengths [B], or None, as int32.

    Args:
      texts: one array by its name.
      least: the smallest length.

    Raises ValueError for other shapes and dtypes, for texts without rows or columns, and for known
    lengths out of range, and tokens within them outside of the vocabulary.
    """
    (name, given), problems = *texts.items(), ArrayProblems()
    ids = problems.integers(name, given, "[B, T]")
    lens = None if lengths is None else problems.integers("lengths", lengths, "[B]")
    problems.raise_all()
    rows, columns = ids.shape
    if min(rows, columns) < 1:
        raise ValueError(f"{name} has shape {[rows, columns]}: give a row, and a token of each")
    inside: Any = True
    if lens is not None:
        if len(lens) != rows:
            raise ValueError(f"lengths has {len(lens)} entries for {rows} rows of {name}")
        rule = f"it must be {least} to {columns}, the columns of {name}"
        problems.within("lengths", lens, lambda x: (x >= least) & (x <= columns), rule)
        values = known(lens)
        inside = np.False_ if values is None else np.arange(columns) < values[:, None]
    rule = f"token ids are 0 to {vocab_size - 1}"
    problems.within(name, ids, lambda x: (x >= 0) & (x < vocab_size) | np.logical_not(inside), rule)
    problems.raise_all()
    return jnp.asarray(ids, jnp.int32), None if lens is None else jnp.asarray(lens, jnp.int32)
