"""Converts the weights of an engine on one device to the layout of a mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config.mixers import AttentionConfig
from jaxspec.decoding.drafters import BlockDrafter, DraftModelDrafter, EagleDrafter, MixedDrafter
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.layer import Layer
from jaxspec.models.mixers import Attention
from jaxspec.models.pipeline_stage import Stage
from jaxspec.parallel import Layout, Shards, mesh_layout, named_shardings


def on_mesh(params: EngineParams, mesh: Mesh, *, shard_drafter: bool = True) -> EngineParams:
    """The same weights over ``mesh``. The drafter's are repeated where it is not sharded."""
    drafter, devices = params.drafter, Shards.over(mesh, mesh_layout(mesh)).of("heads")
    if isinstance(drafter, MixedDrafter):
        inner = on_mesh(params.replace(drafter=drafter.model), mesh, shard_drafter=shard_drafter)
        return inner.replace(drafter=drafter.replace(model=inner.drafter))
    layout = mesh_layout(mesh, split_model=shard_drafter)
    shards = devices if shard_drafter else 1
    if isinstance(drafter, EagleDrafter | BlockDrafter):
        drafter = drafter.replace(head=_laid_out(drafter.head, layout.one_dimensional, shards))
    if isinstance(drafter, DraftModelDrafter):
        drafter = drafter.replace(model=_laid_out(drafter.model, layout, shards))
    target = _laid_out(params.target, mesh_layout(mesh), devices)
    params = params.replace(target=target, drafter=drafter, mesh=mesh)
    return jax.tree.map(jax.device_put, params, named_shardings(mesh, params))


def _laid_out[T: Decoder | DraftHead | BlockHead](model: T, layout: Layout, devices: int) -> T:
    """As decoder_shapes and the shapes of heads describe it for so many devices, still on one."""
    mixers = [layer.mixer for layer in model.config.layers]
    kv_heads = next(one.num_kv_heads for one in mixers if isinstance(one, AttentionConfig))
    repeats = max(1, devices // kv_heads)
    changes: dict[str, Any] = {
        "layout": layout,
        "layers": tuple(_repeat_kv_heads(layer, repeats) for layer in model.layers),
    }
    if isinstance(model, Decoder):
        padding = (0, -model.config.vocab_size % devices)
        assert model.lm_head is not None
        weight = np.pad(np.asarray(model.lm_head.weight), ((0, 0), padding))
        changes["embed"] = np.pad(np.asarray(model.embed), (padding, (0, 0)))
        changes["lm_head"] = model.lm_head.replace(weight=weight)
    return model.replace(**changes)


def _repeat_kv_heads(layer: Layer, repeats: int) -> Layer:
    def repeat(x: Any) -> Any:  # [..., G, R, D]
        if x is None:
            return None
        x = np.asarray(x)
        *lead, groups, _, head_dim = x.shape
        queries = x[..., :-2, :].reshape(*lead, groups * repeats, -1, head_dim)
        return np.concatenate([queries, np.repeat(x[..., -2:, :], repeats, axis=-3)], axis=-2)

    attention: Any = layer.mixer
    if not isinstance(attention, Attention):
        return layer
    qkv = attention.qkv.replace(
        weight=repeat(attention.qkv.weight), bias=repeat(attention.qkv.bias)
    )
    return layer.replace(mixer=attention.replace(qkv=qkv))


def in_stages(
    params: EngineParams, layers: Sequence[int], meshes: Sequence[Mesh], *, shard_drafter: bool
) -> EngineParams:
    """The same weights as a pipeline: so many layers on each mesh. The last has the drafter."""
    whole, stages, first = params.target, [], 0
    for count, mesh in zip(layers[:-1], meshes, strict=False):
        layout = mesh_layout(mesh)
        own = _laid_out(whole, layout, Shards.over(mesh, layout).of("heads"))
        part = own.layers[first : first + count]
        stage = Stage(layers=part, first=first, config=whole.config, layout=layout, mesh=mesh)
        stages.append(jax.tree.map(jax.device_put, stage, named_shardings(mesh, stage)))
        first += count
    last = params.replace(target=whole.replace(layers=whole.layers[first:]))
    last = on_mesh(last, meshes[-1], shard_drafter=shard_drafter)
    return last.replace(stages=tuple(stages))
