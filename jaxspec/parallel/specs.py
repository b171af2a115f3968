"""Partition specs and shardings of whole pytrees, derived from a Layout."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.parallel.layout import WHOLE, Layout
from jaxspec.parallel.pytree import is_static


def partition_specs(tree: Any, layout: Layout = WHOLE, undeclared: tuple[str, ...] = ()) -> Any:
    """The tree with every array replaced by its PartitionSpec under ``layout``.

    An array's logical axes are declared with its field (see pytree.array), or returned by the
    method ``logical_axes`` of its pytree. Arrays without a declaration have the leading axes
    ``undeclared``, or the ``undeclared_axes`` of a pytree around them. A pytree with a field
    ``layout`` is split by that layout instead.
    """
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return jax.tree.map(
            lambda node: (
                partition_specs(node, layout, undeclared)
                if dataclasses.is_dataclass(node)
                else layout.spec(undeclared)
            ),
            tree,
            is_leaf=dataclasses.is_dataclass,
        )
    layout = getattr(tree, "layout", layout)
    undeclared = getattr(tree, "undeclared_axes", undeclared)
    give_axes = getattr(tree, "logical_axes", dict)
    axes_of_fields = give_axes()
    specs = {}
    for field in dataclasses.fields(tree):
        if is_static(field):
            continue
        value = getattr(tree, field.name)
        axes = axes_of_fields.get(field.name, field.metadata.get("axes"))
        if axes is None or value is None:
            specs[field.name] = partition_specs(value, layout, undeclared)
        else:
            specs[field.name] = layout.spec(axes)
    return dataclasses.replace(tree, **specs)


def result_specs(tree: Any, layout: Layout = WHOLE) -> Any:
    """The specs of partition_specs without their trailing Nones.

    jax removes these from the specs of a program's results. Otherwise a new state and a returned
    one would not share a compiled program.
    """

    def trimmed(spec: P) -> P:
        names = list(spec)
        while names and names[-1] is None:
            names.pop()
        return P(*names)

    specs = partition_specs(tree, layout)
    return jax.tree.map(trimmed, specs, is_leaf=lambda leaf: isinstance(leaf, P))


def named_shardings(mesh: Mesh, tree: Any, layout: Layout = WHOLE) -> Any:
    """The specs of result_specs, each bound to ``mesh``."""
    specs = result_specs(tree, layout)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )
