"""The bytes that a round cannot avoid reading, on each device."""

import dataclasses
import math
from typing import Any

import jax

from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder, Layer
from jaxspec.models.eagle import EagleHead
from jaxspec.sharding import data_size
from jaxspec.speculation.drafters import EagleDrafter


@dataclasses.dataclass(frozen=True)
class FloorBytes:
    """Bytes a round reads at least: weights once a pass, keys and values of the context."""

    target_weights: int
    target_kv: int
    draft_weights: int
    draft_kv: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def floor_bytes(params: EngineParams, batch: int, context: float) -> FloorBytes:
    """Of one round over ``batch`` sequences with ``context`` committed tokens on average.

    A drafter's passes are the extension over the newly committed tokens and one for each further
    level; ``fc`` is read by the extension alone. Embedding tables are gathered from, so a table
    counts only where it is the LM head too.
    """
    target, drafter = params.target, params.drafter
    rows = batch // data_size(params.mesh)
    weights = local_bytes(target)
    if target.lm_head is not None:
        weights -= local_bytes(target.embed)
    kv = rows * _kv_bytes(target, context)
    if not isinstance(drafter, EagleDrafter):
        return FloorBytes(weights, kv, 0, 0)
    head, passes = drafter.head, drafter.max_depth
    once = local_bytes((head.fc, head.fc_bias))
    each = local_bytes(head) - once - local_bytes((head.embed, head.token_ids))
    return FloorBytes(
        weights, kv, once + passes * each, round(passes * rows * _kv_bytes(head, context))
    )


def local_bytes(tree: Any) -> int:
    """Bytes of the tree's arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _kv_bytes(model: Decoder | EagleHead, context: float) -> int:
    """Keys and values that one query pass reads of one sequence."""
    config = model.config
    return round(
        sum(
            min(context, window or math.inf) * _slot_bytes(layer, config.head_dim)
            for layer, window in zip(model.layers, config.sliding_windows, strict=True)
        )
    )


def _slot_bytes(layer: Layer, head_dim: int) -> int:
    kv_heads = layer.qkv.sharding.shard_shape(layer.qkv.shape)[1]
    return 2 * kv_heads * head_dim * layer.qkv.dtype.itemsize
