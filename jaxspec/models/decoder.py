"""The decoder-only transformer that serves every supported family.

Weights keep one layout whatever the checkpoint's: query, key and value projections are one array
grouped by KV head, gate and up projections another, and products contract a weight's first
dimension.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.collectives import all_reduce, shard_offset
from jaxspec.config import ModelConfig
from jaxspec.models.layers import (
    Heads,
    add_rms_norm,
    linear,
    linear_parts,
    rms_norm,
    rope_angles,
    swiglu,
)
from jaxspec.pytree import array, pytree, static
from jaxspec.sharding import DATA_PARALLEL
from pallas_kernels.add_rms_norm import WIDTH_STEP
from pallas_kernels.products import einsum_f32
from pallas_kernels.rope_kv_write import HEAD_DIM

# (layer's cache, heads, window) -> (output [B, T, Q, D], cache)
Attend = Callable[[Any, Heads, int | None], tuple[Array, Any]]

FINAL_NORM = -1  # in a capture list: the hidden state after the final norm


@pytree
class Layer:
    """One transformer layer. R = Q / G + 2: a group's query heads, then its key, then its value."""

    input_norm: Array | None = array("hidden")
    qkv: Array = array("hidden", "kv_heads", "group", "head_dim")
    qkv_bias: Array | None = array("kv_heads", "group", "head_dim")
    q_norm: Array | None = array("head_dim")
    k_norm: Array | None = array("head_dim")
    o: Array = array("heads", "hidden")  # [Q * D, H]
    o_bias: Array | None = array("hidden")
    post_norm: Array = array("hidden")
    gate_up: Array = array("hidden", "two", "ff")
    gate_up_bias: Array | None = array("two", "ff")
    down: Array = array("ff", "hidden")
    down_bias: Array | None = array("hidden")


@pytree
class Decoder:
    """A target model's (or draft model's) weights. ``axis`` names the mesh axis it is sharded over,
    None when whole; vocabulary rows past ``config.vocab_size`` pad it to the shards."""

    embed: Array = array("vocab", "hidden")
    layers: tuple[Layer, ...]
    norm: Array = array("hidden")
    lm_head: Array | None = array("hidden", "vocab")  # None: tied to embed
    config: ModelConfig = static()
    axis: str | None = static(default=None)

    @property
    def partition_rules(self) -> dict[str, str] | None:
        """Whole on every device of the model axis unless sharded over it."""
        return DATA_PARALLEL if self.axis is None else None


def layer_shapes(
    config: ModelConfig,
    kv_heads: int,
    dtype: jnp.dtype,
    *,
    input_size: int | None = None,
    input_norm: bool = True,
) -> Layer:
    """A layer of ShapeDtypeStructs. ``input_size``: width that the qkv projection reads."""
    hidden, ff, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    group = config.num_heads // kv_heads + 2

    def shape(*dims: int, when: bool = True) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype) if when else None

    return Layer(
        input_norm=shape(hidden, when=input_norm),
        qkv=shape(input_size or hidden, kv_heads, group, head_dim),
        qkv_bias=shape(kv_heads, group, head_dim, when=config.qkv_bias),
        q_norm=shape(head_dim, when=config.qk_norm),
        k_norm=shape(head_dim, when=config.qk_norm),
        o=shape(config.num_heads * head_dim, hidden),
        o_bias=shape(hidden, when=config.o_bias),
        post_norm=shape(hidden),
        gate_up=shape(hidden, 2, ff),
        gate_up_bias=shape(2, ff, when=config.mlp_bias),
        down=shape(ff, hidden),
        down_bias=shape(hidden, when=config.mlp_bias),
    )


def decoder_shapes(config: ModelConfig, dtype: jnp.dtype, tensor_parallel: int = 1) -> Decoder:
    """A Decoder of ShapeDtypeStructs, as it is laid out for ``tensor_parallel`` devices.

    KV heads are repeated when there are fewer than devices, and the vocabulary is padded to a
    multiple of them.

    Raises ValueError for sizes that the devices cannot share evenly.
    """
    kv_heads = parallel_kv_heads(config, tensor_parallel)
    if config.intermediate_size % tensor_parallel:
        raise ValueError(
            f"intermediate_size {config.intermediate_size} cannot be split over "
            f"{tensor_parallel} devices"
        )
    vocab = -(-config.vocab_size // tensor_parallel) * tensor_parallel
    layer, hidden = layer_shapes(config, kv_heads, dtype), config.hidden_size

    def shape(*dims: int, when: bool = True) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype) if when else None

    return Decoder(
        embed=shape(vocab, hidden),
        layers=(layer,) * config.num_layers,
        norm=shape(hidden),
        lm_head=shape(hidden, vocab, when=not config.tie_word_embeddings),
        config=config,
    )


def parallel_kv_heads(config: ModelConfig, tensor_parallel: int) -> int:
    """KV heads as laid out over the devices: the model's, or one a device when it has fewer."""
    kv_heads = max(config.num_kv_heads, tensor_parallel)
    if kv_heads % tensor_parallel or kv_heads % config.num_kv_heads or config.num_heads % kv_heads:
        raise ValueError(
            f"{config.num_heads} query and {config.num_kv_heads} KV heads cannot be split over "
            f"{tensor_parallel} devices"
        )
    return kv_heads


@jax.named_scope("embed")
def embed(decoder: Decoder, tokens: Array) -> Array:
    """Token embeddings: int [B, T] -> [B, T, H]."""
    if decoder.axis is None:
        return decoder.embed[tokens]
    size = decoder.embed.shape[0]
    local = tokens - shard_offset(size, decoder.axis)
    here = (local >= 0) & (local < size)
    rows = decoder.embed[jnp.clip(local, 0, size - 1)]
    return all_reduce(jnp.where(here[..., None], rows, 0), decoder.axis)


def attention_block(
    layer: Layer,
    config: ModelConfig,
    x: Array,  # [B, T, input size]
    rope: Array,
    cache: Any,
    attend: Attend,
    window: int | None,
    axis: str | None,
) -> tuple[Array, Any]:
    """Attention from normed input to parts [S, B, T, H] of what the residual stream gains."""
    with jax.named_scope("qkv"):
        fits = config.head_dim == HEAD_DIM
        parts = linear_parts(x, layer.qkv, layer.qkv_bias, "rope_kv_write", consumer_fits=fits)
    heads = Heads(parts, x.dtype, rope, layer.q_norm, layer.k_norm, config.rms_norm_eps)
    out, cache = attend(cache, heads, window)
    with jax.named_scope("o"):
        flat = out.reshape(*x.shape[:2], -1)
        return _residual_parts(flat, layer.o, layer.o_bias, axis), cache


@jax.named_scope("mlp")
def mlp_block(layer: Layer, x: Array, axis: str | None) -> Array:
    """SwiGLU MLP from normed input to parts [S, B, T, H] of what the residual stream gains."""
    hidden = swiglu(linear(x, layer.gate_up, layer.gate_up_bias))
    return _residual_parts(hidden, layer.down, layer.down_bias, axis)


def _residual_parts(x: Array, weight: Array, bias: Array | None, axis: str | None) -> Array:
    """Parts [S, ..., H] of a product over a sharded dimension; the bias is not sharded."""
    if axis is None:
        fits = weight.shape[-1] % WIDTH_STEP == 0
        return linear_parts(x, weight, bias, "add_rms_norm", consumer_fits=fits)
    y = all_reduce(linear(x, weight), axis)
    return (y if bias is None else y + bias)[None]


def run(
    decoder: Decoder,
    tokens: Array,
    positions: Array,
    caches: tuple[Any, ...],
    attend: Attend,
    capture: tuple[int, ...] = (),
) -> tuple[Array, tuple[Any, ...], Array | None]:
    """All layers over tokens [B, T] at rotary positions [B, T].

    ``capture`` lists hidden states to return side by side: ``i`` is the residual stream after
    ``i`` layers, FINAL_NORM the output itself.

    Returns (hidden after the final norm [B, T, H], caches, captured [B, T, C] or None).
    """
    config = decoder.config
    eps, axis = config.rms_norm_eps, decoder.axis
    x = embed(decoder, tokens)
    normed = rms_norm(x, decoder.layers[0].input_norm, eps)
    rope = rope_angles(config, positions)
    # Each block's input is the norm of the residual stream, made with the addition before it.
    following_norms = [layer.input_norm for layer in decoder.layers[1:]] + [decoder.norm]
    residuals, new_caches = {0: x}, []
    for index, (layer, cache) in enumerate(zip(decoder.layers, caches, strict=True)):
        window = config.sliding_windows[index]
        y, cache = attention_block(layer, config, normed, rope, cache, attend, window, axis)
        x, normed = add_rms_norm(x, y, layer.post_norm, eps)
        y = mlp_block(layer, normed, axis)
        x, normed = add_rms_norm(x, y, following_norms[index], eps)
        residuals[index + 1] = x
        new_caches.append(cache)
    residuals[FINAL_NORM] = normed
    captured = jnp.concatenate([residuals[i] for i in capture], axis=-1) if capture else None
    return normed, tuple(new_caches), captured


@jax.named_scope("lm_head")
def logits(decoder: Decoder, hidden: Array) -> Array:
    """Float32 logits of normed hidden states, this shard's part: [..., H] -> [..., V / shards]."""
    if decoder.lm_head is None:
        scores = einsum_f32("...h,vh->...v", hidden, decoder.embed)
    else:
        scores = einsum_f32("...h,hv->...v", hidden, decoder.lm_head)
    vocab = decoder.config.vocab_size
    if decoder.axis is None and scores.shape[-1] == vocab:
        return scores
    ids = jnp.arange(scores.shape[-1]) + shard_offset(scores.shape[-1], decoder.axis)
    return jnp.where(ids < vocab, scores, -jnp.inf)
