"""Gives models the memory that their kernels keep from call to call: in which devices add up
row-parallel products, or in which thread blocks of a device meet."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxspec.decoding.drafters.block import with_costs_of
from jaxspec.decoding.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.pipeline_stage import Stage
from jaxspec.models.quantized.kv_cache import with_scales_of
from jaxspec.parallel.placement import in_place_of
from jaxspec.parallel.pytree import is_static
from pallas_kernels.o_gate_up_down.meeting import MEETING, make_meeting
from pallas_kernels.reduce_add_rms_norm.exchange import make_exchange

Make = Callable[[Mesh, str, int], Any]  # mesh, axis and width -> an exchange or None
Meet = Callable[[Any], Any]  # an array of the device -> a meeting or None


def with_exchanges(
    params: EngineParams, make: Make = make_exchange, meet: Meet = make_meeting
) -> EngineParams:
    """The parameters with a new exchange in each model that is split over one mesh axis, if their
    kernels use it and the devices can (see pallas_kernels/reduce_add_rms_norm/exchange.py); on a
    single device with a new meeting in each model (see pallas_kernels/o_gate_up_down/meeting.py).

    Each model has its own, because no two calls may use one at once. Programs that may run at the
    same time must not share it either, so each engine makes its own. Without one, devices sum
    through XLA, and layers run in several launches.
    """
    if params.mesh is None:
        if not any(name in params.kernels for name in MEETING):
            return params
        return _replaced(params, lambda model: meet(params.target.embed))
    if "reduce_add_rms_norm" not in params.kernels:
        return params
    stages = tuple(_replaced(stage, _split_over(stage.mesh, make)) for stage in params.stages)
    last_stage = _replaced(params.last_stage, _split_over(params.mesh, make))
    return last_stage.replace(stages=stages)


def without_exchanges[T](tree: T) -> T:
    """A model, or a drafter with its models, as it was loaded."""
    return _replaced(tree, lambda model: None)


def replacement[T](current: T, new: T) -> T:
    """``new`` where ``current`` lies (see parallel.placement), both without exchanges. If the cache
    has 8-bit pages, weights without scales take those in use; drafters, the costs in use."""
    new = with_costs_of(current, with_scales_of(current, without_exchanges(new)))
    return in_place_of(without_exchanges(current), new)


def _split_over(mesh: Mesh, make: Make) -> Callable[[Any], Any]:
    """The exchange of a model on a mesh."""

    def exchange(model: Any) -> Any:
        axes = {model.layout.heads, model.layout.ff}
        axis = axes.pop()
        if axes or len(axis) != 1 or isinstance(model, BlockHead):
            return None
        return make(mesh, axis[0], model.config.hidden_size)

    return exchange


def _replaced[T](tree: T, make: Callable[[Any], Any]) -> T:
    if isinstance(tree, Decoder | DraftHead | BlockHead | Stage):
        return tree.replace(exchange=make(tree))
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
