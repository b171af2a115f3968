"""Caches of 8-bit pages: which layers have them, and the scales of their keys and values.

A layer whose Attention has KVScales keeps e4m3 numbers, half as many bytes as bfloat16; see
pallas_kernels/float8.py. Scales are weights, so a cache's layout follows from the parameters alone,
and what is stored of a token depends on no other token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxspec.cache import KVScales
from jaxspec.models.mixers import Attention
from jaxspec.parallel import named_shardings

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

    def scaled(node: Any) -> Any:
        if not isinstance(node, Attention) or node.kv_scales is not None:
            return node
        heads = node.qkv.out_shape[0]
        return node.replace(kv_scales=_ones(heads, jax.tree.leaves(node)[0], mesh))

    made = jax.tree.map(scaled, weights, is_leaf=_is_attention)
    return made if mesh is None else _placed(made, mesh)


def with_kv_scales[T](weights: T, scales: Sequence[KVScales], mesh: Mesh | None) -> T:
    """The same with given scales, one KVScales for each attention layer in order.

    Where devices repeat KV heads, so are scales.

    Raises ValueError for another number of them, and for scales that are not positive and finite or
    not one for each KV head.
    """
    layers = count_attentions(weights)
    if len(scales) != layers:
        raise ValueError(f"{len(scales)} scales for {layers} layers of attention: give one each")
    own = iter(scales)

    def scaled(node: Any) -> Any:
        if not _is_attention(node):
            return node
        return node.replace(kv_scales=_checked(next(own), node))

    made = jax.tree.map(scaled, weights, is_leaf=_is_attention)
    return made if mesh is None else _placed(made, mesh)


def _checked(scales: KVScales, attention: Attention) -> KVScales:
    heads = attention.config.num_kv_heads
    found = []
    for name, scale in (("k", scales.k), ("v", scales.v)):
        values = np.asarray(scale)
        if values.shape != (heads,) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(
                f"{name} scales must be {heads} finite numbers above 0, one for each KV head, got "
                f"{values.tolist()}"
            )
        repeated = np.repeat(values, attention.qkv.out_shape[0] // heads)
        found.append(jnp.asarray(repeated, jnp.float32))
    return KVScales(k=found[0], v=found[1])


def without_kv_scales[T](weights: T) -> T:
    """The weights alone: for training, and for files."""

    def bare(node: Any) -> Any:
        return node.replace(kv_scales=None) if _is_attention(node) else node

    return jax.tree.map(bare, weights, is_leaf=_is_attention)


def with_scales_of[T](current: T, new: T) -> T:
    """``new``, whose attention layers without scales get those of ``current``."""
    own = iter(list(_attentions(current)))

    def scaled(node: Any) -> Any:
        if not _is_attention(node):
            return node
        old = next(own, None)
        if old is None or node.kv_scales is not None:
            return node
        return node.replace(kv_scales=old.kv_scales)

    return jax.tree.map(scaled, new, is_leaf=_is_attention)


def has_float8_cache(weights: Any) -> bool:
    """Whether any attention layer of a tree of weights has 8-bit pages."""
    return any(node.kv_scales is not None for node in _attentions(weights))


def count_attentions(weights: Any) -> int:
    """Attention layers of a tree of weights."""
    return len(list(_attentions(weights)))


def _attentions(weights: Any) -> Iterator[Attention]:
    nodes = jax.tree.leaves(weights, is_leaf=_is_attention)
    return (node for node in nodes if isinstance(node, Attention))


def _is_attention(node: Any) -> bool:
    return isinstance(node, Attention)


def _ones(heads: int, like: Any, mesh: Mesh | None) -> KVScales:
    """Scales of 1, beside the weight ``like``."""
    if not isinstance(like, Array):
        shape: Any = jax.ShapeDtypeStruct((heads,), jnp.float32)
        return KVScales(k=shape, v=shape)
    one = np.ones(heads, np.float32)
    place = like.sharding if mesh is None else None
    return KVScales(k=jax.device_put(one, place), v=jax.device_put(one, place))


def _placed[T](weights: T, mesh: Mesh) -> T:
    """The weights, with scales split over the mesh as KV heads are."""

    def place(node: Any, shardings: Any) -> Any:
        if not _is_attention(node) or not isinstance(node.kv_scales.k, Array):
            return node
        return node.replace(kv_scales=jax.device_put(node.kv_scales, shardings.kv_scales))

    places = named_shardings(mesh, weights)
    return jax.tree.map(place, weights, places, is_leaf=_is_attention)
