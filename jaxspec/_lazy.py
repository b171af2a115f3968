"""Packages whose names load their modules when they are first asked for (PEP 562), and modules
that load later.

``import jaxspec`` then takes no time, and a command loads what it uses. Names stay those that the
package lists in ``__all__``; type checkers read them from its ``if TYPE_CHECKING`` block.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package; ``homes`` are the names of each module."""
    modules = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: sorted(modules)


class LazyModule:
    """A module that is loaded when its first name is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
