"""Reading JSON files that others wrote: anything may be in them, and every error is one line."""

import contextlib
import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_SIZE = 2**31 - 1  # sizes and ids are int32 on the device
SMALLEST, LARGEST = 1e-30, 1e30  # of the numbers that configs have, well inside float32
KEPT = 300  # characters of either end of a long message

_SHORT = reprlib.Repr(maxlevel=3, maxlist=12, maxdict=6, maxstring=120, maxlong=40, maxother=120)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a model directory?") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not JSON, or a giant number
        raise ValueError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts ``where`` before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def shown(value: Any) -> str:
    """A value for a message: one line, and never long or deep."""
    return _SHORT.repr(value)


def shown_name(name: str) -> str:
    """A name for a message: as it is if it is plain, else quoted."""
    return name if name.isprintable() and len(name) <= _SHORT.maxstring else shown(name)


def one_line(error: Exception) -> str:
    """The message of an error of some library, on one line, its middle left out if it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= 2 * KEPT else f"{text[:KEPT]} ... {text[-KEPT:]}"


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive_integer(value: Any) -> bool:
    """Whether the value is a size that a device can count to."""
    return is_integer(value) and 0 < value <= LARGEST_SIZE


def is_positive_number(value: Any) -> bool:
    """Whether the value is a number that a float32 holds, above zero."""
    is_number = isinstance(value, float) or is_integer(value)
    return is_number and SMALLEST <= value <= LARGEST


def check_flag(name: str, value: Any) -> bool:
    """The value, if it is true or false. Raises ValueError if not."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value
