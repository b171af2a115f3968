"""Objects of several kinds, told by a field such as ``type``."""

import functools
import operator
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator
from pydantic_core import PydanticCustomError

MOST_ITEMS = 10_000  # of a list


class Echoed(BaseModel):
    """What clients may send back as a server wrote it: fields that are not read here are ignored,
    as other servers have further ones."""

    model_config = ConfigDict(extra="ignore", strict=True)


def of_kind(
    what: str,
    kinds: Mapping[str, type[BaseModel]],
    default: str = "",
    words: tuple[str, ...] = (),
    key: str = "type",
) -> PlainValidator:
    """Reads an object as the model of its ``type``: errors are those of that kind alone.

    Args:
      what: the objects, in the plural: a kind that is not known is refused by its name.
      default: the type of an object that has none.
      words: texts that may stand in place of an object.
      key: the field that tells the kind.
    """
    among, models = "".join(f"{word!r}, " for word in words), tuple(kinds.values())

    def read(value: Any) -> BaseModel | str:
        if isinstance(value, models) or (isinstance(value, str) and value in words):
            return value
        if not isinstance(value, dict):
            message = "Input should be {words}an object"
            raise PydanticCustomError("kind", message, {"words": among and f"{among}or "})
        kind = value.get(key) or default
        if not isinstance(kind, str) or kind not in kinds:
            known = ", ".join(kinds)
            raise PydanticCustomError(
                "kind",
                "{what} of {key} {kind} are not supported: there are {known}",
                {"what": what, "key": key, "kind": repr(kind)[:80], "known": known},
            )
        return kinds[kind].model_validate(value)

    union = functools.reduce(operator.or_, models, *([Literal[words]] if words else ()))
    return PlainValidator(read, json_schema_input_type=union)
