"""Nodes of some kind in a tree of weights."""

from collections.abc import Callable
from typing import Any

import jax


def nodes_of[Node](weights: Any, *kinds: type[Node]) -> list[Node]:
    """All nodes of these kinds, in order."""
    nodes = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def map_nodes[Weights, Node](
    weights: Weights, change: Callable[[Node], Any], *kinds: type[Node]
) -> Weights:
    """The weights with ``change(node)`` in place of each node of these kinds."""
    return jax.tree.map(
        lambda node: change(node) if isinstance(node, kinds) else node,
        weights,
        is_leaf=lambda node: isinstance(node, kinds),
    )
