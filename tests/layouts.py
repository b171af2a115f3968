"""An engine on one device, laid out anew for a mesh."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder, Layer
from jaxspec.models.eagle import EagleHead
from jaxspec.sharding import MODEL_AXIS, model_size, named_shardings
from jaxspec.speculation.drafters import DraftModelDrafter, EagleDrafter


def on_mesh(params: EngineParams, mesh: Mesh, *, shard_drafter: bool = True) -> EngineParams:
    """The same weights over ``mesh``. The drafter's are repeated where it is not sharded."""
    drafter, devices = params.drafter, model_size(mesh)
    if shard_drafter and isinstance(drafter, EagleDrafter):
        drafter = dataclasses.replace(drafter, head=_split(drafter.head, devices))
    if shard_drafter and isinstance(drafter, DraftModelDrafter):
        drafter = dataclasses.replace(drafter, model=_split(drafter.model, devices))
    params = dataclasses.replace(
        params, target=_split(params.target, devices), drafter=drafter, mesh=mesh
    )
    return jax.tree.map(jax.device_put, params, named_shardings(mesh, params))


def _split[T: Decoder | EagleHead](model: T, devices: int) -> T:
    """The layout that decoder_shapes and head_shapes describe, still on one device."""
    if devices == 1:
        return model
    repeats = max(1, devices // model.config.num_kv_heads)
    changes: dict[str, Any] = {
        "axis": MODEL_AXIS,
        "layers": tuple(_repeat_kv_heads(layer, repeats) for layer in model.layers),
    }
    if isinstance(model, Decoder):
        padding = (0, -model.config.vocab_size % devices)
        changes["embed"] = np.pad(np.asarray(model.embed), (padding, (0, 0)))
        changes["lm_head"] = np.pad(np.asarray(model.lm_head), ((0, 0), padding))
    return dataclasses.replace(model, **changes)


def _repeat_kv_heads(layer: Layer, repeats: int) -> Layer:
    def repeat(x: Any) -> Any:  # [..., G, R, D]
        if x is None:
            return None
        *lead, groups, _, head_dim = x.shape
        queries = x[..., :-2, :].reshape(*lead, groups * repeats, -1, head_dim)
        return np.concatenate([queries, np.repeat(x[..., -2:, :], repeats, axis=-3)], axis=-2)

    return dataclasses.replace(layer, qkv=repeat(layer.qkv), qkv_bias=repeat(layer.qkv_bias))
