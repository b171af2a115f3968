"""Gives models the memory in which devices add up their row-parallel products."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.pytree import is_static
from pallas_kernels.reduce_add_rms_norm.exchange import make_exchange

Make = Callable[[Mesh, str, int], Any]  # mesh, axis and width -> an exchange or None


def with_exchanges(params: EngineParams, make: Make = make_exchange) -> EngineParams:
    """The parameters with an exchange in each model that is split over one mesh axis, if their
    kernels use it and the devices can (see pallas_kernels/reduce_add_rms_norm/exchange.py).

    Each model has its own, because no two calls may use one at once. Engines on the same devices
    must not share it either: make one set of parameters for each.
    """
    if params.mesh is None or "reduce_add_rms_norm" not in params.kernels:
        return params
    return _with_exchanges(params, params.mesh, make)


def _with_exchanges[T](tree: T, mesh: Mesh, make: Make) -> T:
    if isinstance(tree, Decoder | DraftHead):
        axes = {tree.layout.heads, tree.layout.ff}
        axis = axes.pop()
        if axes or len(axis) != 1:
            return tree
        return tree.replace(exchange=make(mesh, axis[0], tree.config.hidden_size))
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return tree
    parts = {
        field.name: _with_exchanges(getattr(tree, field.name), mesh, make)
        for field in dataclasses.fields(tree)
        if not is_static(field)
    }
    return dataclasses.replace(tree, **parts)
