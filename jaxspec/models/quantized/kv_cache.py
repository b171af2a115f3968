"""Caches of 8-bit pages: which layers have them, and the scales of their keys and values.

A layer whose Attention has KVScales keeps e4m3 numbers, half as many bytes as bfloat16; see
pallas_kernels/float8.py. Scales are weights, so a cache's layout follows from the parameters alone,
and what is stored of a token depends on no other token.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxspec.cache import KVScales
from jaxspec.models.mixers import Attention
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.parallel import named_shardings
from jaxspec.parallel.memory_format import put_weight

FP8 = "fp8"


def check_kv_dtype(name: str | None) -> None:
    """Raises ValueError for a name of no kind of cache."""
    if name not in (None, FP8):
        raise ValueError(f'kv_dtype must be "{FP8}", or None for the model\'s dtype, got {name!r}')


def with_float8_cache[T](weights: T, mesh: Mesh | None) -> T:
    """A model, a head, a stage or a drafter whose attention layers have 8-bit pages.

    Layers without scales get scales of 1, which stores keys and values of up to 448 as they are,
    rounded. Of ShapeDtypeStructs, the result is too.

    Args:
      mesh: where the weights lie; None: on one device.
    """

    def scaled(node: Attention) -> Attention:
        return node if node.kv_scales is not None else node.replace(kv_scales=_ones(node))

    return _placed(map_nodes(weights, scaled, Attention), mesh)


def with_kv_scales[T](weights: T, scales: Sequence[KVScales], mesh: Mesh | None) -> T:
    """The same with given scales, one KVScales for each attention layer in order.

    Where devices repeat KV heads, so are scales.

    Raises ValueError for another number of them, and for scales that are not positive and finite or
    not one for each KV head.
    """
    layers = count_attentions(weights)
    if len(scales) != layers:
        raise ValueError(f"{len(scales)} scales for {layers} layers of attention: give one each")
    remaining = iter(scales)

    def scaled(node: Attention) -> Attention:
        return node.replace(kv_scales=_checked(next(remaining), node))

    return _placed(map_nodes(weights, scaled, Attention), mesh)


def without_kv_scales[T](weights: T) -> T:
    """The weights alone: for training, and for files."""
    return map_nodes(weights, lambda node: node.replace(kv_scales=None), Attention)


def with_scales_of[T](current: T, new: T) -> T:
    """``new``, whose attention layers without scales get those of ``current``."""
    remaining = iter(nodes_of(current, Attention))

    def scaled(node: Attention) -> Attention:
        old = next(remaining, None)
        if old is None or node.kv_scales is not None:
            return node
        return node.replace(kv_scales=old.kv_scales)

    return map_nodes(new, scaled, Attention)


def has_float8_cache(weights: Any) -> bool:
    """Whether any attention layer of a tree of weights has 8-bit pages."""
    return any(node.kv_scales is not None for node in nodes_of(weights, Attention))


def count_attentions(weights: Any) -> int:
    """Attention layers of a tree of weights."""
    return len(nodes_of(weights, Attention))


def _is_attention(node: Any) -> bool:
    return isinstance(node, Attention)


def _checked(scales: KVScales, attention: Attention) -> KVScales:
    heads = attention.config.num_kv_heads
    found: list[Any] = []
    for name, scale in (("k", scales.k), ("v", scales.v)):
        values = np.asarray(scale)
        if values.shape != (heads,) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(
                f"{name} scales must be {heads} finite numbers above 0, one for each KV head, got "
                f"{values.tolist()}"
            )
        repeated = np.repeat(values, attention.qkv.out_shape[0] // heads)
        found.append(repeated.astype(np.float32))
    return KVScales(k=found[0], v=found[1])


def _ones(attention: Attention) -> KVScales:
    """Scales of 1; shapes for an Attention of shapes."""
    heads = attention.qkv.out_shape[0]
    ones: Any = np.ones(heads, np.float32)
    if not isinstance(jax.tree.leaves(attention)[0], Array):
        ones = jax.ShapeDtypeStruct(ones.shape, ones.dtype)
    return KVScales(k=ones, v=ones)


def _placed[T](weights: T, mesh: Mesh | None) -> T:
    """The weights, with scales split over the mesh as KV heads are, or beside them."""

    def place(node: Any, sharding: Any) -> Any:
        if not _is_attention(node) or isinstance(node.kv_scales.k, jax.ShapeDtypeStruct):
            return node
        if mesh is not None:
            return node.replace(kv_scales=jax.device_put(node.kv_scales, sharding.kv_scales))
        beside = jax.tree.leaves(node)[0].sharding
        scales = jax.tree.map(lambda scale: put_weight(scale, beside), node.kv_scales)
        return node.replace(kv_scales=scales)

    places = weights if mesh is None else named_shardings(mesh, weights)
    return jax.tree.map(place, weights, places, is_leaf=_is_attention)
