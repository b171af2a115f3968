"""Parameters whose caches have 8-bit pages, with other scales for every layer and head."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.cache import KVScales
from jaxspec.functional import EngineParams
from jaxspec.models.mixers import Attention
from jaxspec.models.quantized.kv_cache import with_kv_scales


def with_float8(params: EngineParams) -> EngineParams:
    """Scales are coarse: texts are others than with float32 pages."""
    return params.replace(
        target=scaled(params.target, params.mesh, sum(len(own.layers) for own in params.stages)),
        drafter=scaled(params.drafter, params.mesh),
        stages=tuple(scaled(stage, stage.mesh, stage.first) for stage in params.stages),
    )


def scaled[T](weights: T, mesh: Mesh | None, first: int = 0) -> T:
    """``first``: index of the first layer."""
    nodes = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Attention))
    layers: list[Any] = [node for node in nodes if isinstance(node, Attention)]
    heads = [layer.qkv.out_shape[0] // layer.config.num_kv_heads for layer in layers]
    scales = [
        _scales(first + index, layer.config.num_kv_heads, repeats)
        for index, (layer, repeats) in enumerate(zip(layers, heads, strict=True))
    ]
    return with_kv_scales(weights, scales, mesh)


def _scales(layer: int, heads: int, repeats: int) -> KVScales:
    own = jnp.repeat(0.01 * (1.5 + layer) * (1 + jnp.arange(heads, dtype=jnp.float32)), repeats)
    return KVScales(k=own, v=own / 3)
