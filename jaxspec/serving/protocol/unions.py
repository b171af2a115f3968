"""Fields that may be of several shapes: errors are those of the shape that a value has."""

from collections.abc import Mapping
from typing import Any

from pydantic import Discriminator

# In the places of errors these stand for themselves, see errors.py.
TEXT, LIST, OBJECT, TOKENS, LISTS = "<text>", "<list>", "<object>", "<tokens>", "<lists>"


def is_shape(name: str) -> bool:
    """Whether a part of an error's place is a shape, not a name."""
    return name.startswith("<")


def shape_of(value: Any) -> str | None:
    """Text, a list, an object, or None for anything else."""
    match value:
        case str():
            return TEXT
        case list():
            return LIST
        case Mapping():
            return OBJECT
    return None


def prompt_shape(value: Any) -> str | None:
    """That of a prompt or several: a list is told by its first item."""
    if isinstance(value, list) and value:
        inner = shape_of(value[0])
        return {TEXT: LIST, LIST: LISTS}.get(inner or "", TOKENS)
    return TOKENS if value == [] else shape_of(value)


def by_shape(message: str, shape: Any = shape_of) -> Discriminator:
    """Chooses among Tags; a value of another shape is refused with this message."""
    return Discriminator(shape, custom_error_type="shape", custom_error_message=message)
