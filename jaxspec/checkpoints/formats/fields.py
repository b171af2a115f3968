"""Reading the fields of a ``quantization_config``: what is not supported is named."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.json.values import is_positive_integer, shown


class Fields:
    """The fields of an object in a config file. Each must be read or ignored by name.

    ``where`` names the object in errors.
    """

    def __init__(self, where: str, content: Mapping[str, Any]):
        self._where = where
        self._content = content
        self._read: set[str] = set()

    def get(self, name: str, *, aliases: tuple[str, ...] = (), default: Any = None) -> Any:
        """The field's value, or that of the first alias that is there."""
        names = (name, *aliases)
        self._read.update(names)
        found = [self._content[name] for name in names if self._content.get(name) is not None]
        return found[0] if found else default

    def must_be(
        self, name: str, *allowed: Any, aliases: tuple[str, ...] = (), default: Any = None
    ) -> Any:
        """The field's value. Raises ValueError if it is none of ``allowed``."""
        value = self.get(name, aliases=aliases, default=default)
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            choices = " or ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{self._where}: {name} is {shown(value)}; supported is {choices}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Raises ValueError unless the field is true or false, or not there."""
        return self.must_be(name, True, False, default=default)

    def group_size(self, name: str, aliases: tuple[str, ...] = ()) -> int | None:
        """Inputs that share a scale; None for -1: all of them.

        Raises ValueError for another number below 1, or none.
        """
        value = self.get(name, aliases=aliases)
        if value != -1 and not is_positive_integer(value):
            raise ValueError(
                f"{self._where}: {name} must be a positive integer, or -1 for all inputs, got "
                f"{shown(value)}"
            )
        return None if value == -1 else value

    def ignored(self, *names: str) -> None:
        """Marks fields that have no effect on what the weights mean."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Raises ValueError that names the fields which were neither read nor ignored."""
        unread = [name for name in self._content if name not in self._read]
        if unread:
            named = ", ".join(f"field {shown(n)} (= {shown(self._content[n])})" for n in unread)
            raise ValueError(
                f"{self._where}: {named} is not supported. Remove it if it does not change what "
                "the weights mean"
            )
