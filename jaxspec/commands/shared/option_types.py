"""Types of options: what argparse makes of the text of a value."""

import argparse
import math
import re

GRID = re.compile(r"(?:(\d+)x)?(\d+)")


def number(text: str) -> int:
    """A number of at least 1."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def whole_number(text: str) -> int:
    """A number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of at least 1, separated by commas."""
    return tuple(map(number, text.split(",")))


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers of at least 0, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers such as 0,1, got {text!r}")
    return tuple(map(int, parts))


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def positives(text: str) -> tuple[float, ...]:
    """Finite numbers above 0, separated by commas."""
    return tuple(map(positive, text.split(",")))


def tensor_parallel(text: str) -> int | tuple[int, int]:
    """A number of devices, such as ``4``, or a grid, such as ``2x2``."""
    found = GRID.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of devices, or XxY as in 2x2")
    x, y = found.groups()
    return int(y) if x is None else (int(x), int(y))
