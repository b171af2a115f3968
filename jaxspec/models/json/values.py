"""Reading untrusted JSON files: every invalid content is a ValueError of one line."""

import contextlib
import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_SIZE = 2**31 - 1  # sizes and ids are int32 on the device
SMALLEST, LARGEST = 1e-30, 1e30  # limits of numbers in configs, well inside float32's range
KEPT = 300  # characters kept of each end of a long message

_SHORT = reprlib.Repr(maxlevel=3, maxlist=12, maxdict=6, maxstring=120, maxlong=40, maxother=120)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if the file holds none."""
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
    """A value as text for a message: one line, shortened if it is long or deep."""
    return _SHORT.repr(value)


def shown_name(name: str) -> str:
    """A name for a message, quoted unless it is a plain one."""
    return name if name.isprintable() and len(name) <= _SHORT.maxstring else shown(name)


def one_line(error: Exception) -> str:
    """The message of a library's error on one line; a long one loses its middle."""
    text = " ".join(str(error).split())
    return text if len(text) <= 2 * KEPT else f"{text[:KEPT]} ... {text[-KEPT:]}"


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive_integer(value: Any) -> bool:
    """Whether the value is an integer from 1 to LARGEST_SIZE."""
    return is_integer(value) and 0 < value <= LARGEST_SIZE


def is_positive_number(value: Any) -> bool:
    """Whether the value is a positive number within float32's range."""
    is_number = isinstance(value, float) or is_integer(value)
    return is_number and SMALLEST <= value <= LARGEST


def check_flag(name: str, value: Any) -> bool:
    """Returns the value. Raises ValueError unless it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value
