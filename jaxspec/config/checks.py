"""Checks of values that users give, and lists in the errors about them."""

import reprlib
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np


def is_integer(value: object) -> TypeGuard[int]:
    """Whether the value has an integer type other than bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is an integer or a float."""
    return is_integer(value) or isinstance(value, (float, np.floating))


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless it is an integer of at least 1."""
    if not (is_integer(value) and value >= 1):
        raise ValueError(f"{name} must be an integer, at least 1, got {reprlib.repr(value)}")


def check_positive(**values: float) -> None:
    """Raise ValueError unless each value is above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError for text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is no valid Unicode: character {error.start} is half a surrogate pair"
        ) from None


def first_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first texts of a list that may be long: ``a, b and 3 more``."""
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")
