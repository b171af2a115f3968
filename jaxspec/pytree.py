"""Frozen dataclasses that are jax pytrees, with each array's logical axes declared beside it."""

import dataclasses
from typing import Any, dataclass_transform

import jax


def array(*axes: str) -> Any:
    """Declare an array field and its logical axis names, outermost first (see sharding.py)."""
    return dataclasses.field(metadata={"axes": axes})


def static(**options: Any) -> Any:
    """Declare a hashable field that is part of the tree's structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(array, static, dataclasses.field)
)
def pytree[T](cls: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass registered as a pytree."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
