"""Gives models the memory in which devices add up their row-parallel products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxspec.decoding.drafters.block import with_costs_of
from jaxspec.decoding.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.models.pipeline_stage import Stage
from jaxspec.models.quantized.kv_cache import with_scales_of
from jaxspec.parallel.placement import in_place_of
from jaxspec.parallel.pytree import is_static
from pallas_kernels.reduce_add_rms_norm.exchange import make_exchange

Make = Callable[[Mesh, str, int], Any]  # mesh, axis and width -> an exchange or None


def with_exchanges(params: EngineParams, make: Make = make_exchange) -> EngineParams:
    """The parameters with a new exchange in each model that is split over one mesh axis, if their
    kernels use it and the devices can (see pallas_kernels/reduce_add_rms_norm/exchange.py).

    Each model has its own, because no two calls may use one at once. Programs that may run at the
    same time must not share it either, so each engine makes its own. Without one, devices sum
    through XLA.
    """
    if params.mesh is None or "reduce_add_rms_norm" not in params.kernels:
        return params
    stages = tuple(_replaced(stage, functools.partial(make, stage.mesh)) for stage in params.stages)
    last_stage = _replaced(params.last_stage, functools.partial(make, params.mesh))
    return last_stage.replace(stages=stages)


def without_exchanges[T](tree: T) -> T:
    """A model, or a drafter with its models, as it was loaded."""
    return _replaced(tree, lambda axis, width: None)


def replacement[T](current: T, new: T) -> T:
    """``new`` where ``current`` lies (see parallel.placement), both without exchanges. If the cache
    has 8-bit pages, weights without scales take those in use; drafters, the costs in use."""
    new = with_costs_of(current, with_scales_of(current, without_exchanges(new)))
    return in_place_of(without_exchanges(current), new)


def _replaced[T](tree: T, make: Callable[[str, int], Any]) -> T:
    if isinstance(tree, Decoder | DraftHead | Stage):
        axes = {tree.layout.heads, tree.layout.ff}
        axis = axes.pop()
        if axes or len(axis) != 1:
            return tree
        return tree.replace(exchange=make(axis[0], tree.config.hidden_size))
    if type(tree) is tuple:  # the heads of a drafter
        heads: Any = tuple(_replaced(part, make) for part in tree)
        return heads
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return tree
    parts = {
        field.name: _replaced(getattr(tree, field.name), make)
        for field in dataclasses.fields(tree)
        if not is_static(field)
    }
    return dataclasses.replace(tree, **parts)
