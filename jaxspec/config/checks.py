"""Checks of values that users give, and lists in the errors about them."""

import contextlib
import reprlib
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import numpy as np


class Problems:
    """What is wrong with what a user gives: each check is made, and one error names all that was
    found."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Keep the message of a ValueError."""
        try:
            yield
        except ValueError as error:
            self.add(str(error))

    def add(self, problem: str) -> None:
        self._found[problem] = None  # a check that is made twice is named once

    def raise_all(self, most: int | None = None) -> None:
        """Raise ValueError if there are any. ``most``: the number that are named; None: all."""
        found = [*self._found]
        if most is not None and len(found) > most:
            found[most:] = [f"and {len(found) - most} problems more"]
        if found:
            raise ValueError("; ".join(found))


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
