"""Where trainers keep the tensors of a checkpoint: tables for flax_bridge, by trainer and family.

Layouts are those of google-tunix 0.1.7 and MaxText 0.2.5. They are stated for every matrix.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxspec.checkpoints.flax_bridge import Names
from jaxspec.config.model import ModelConfig

LAYER = "model.layers.{i}."
ATTENTION, MLP = f"{LAYER}self_attn.", f"{LAYER}mlp."
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

INTO_HEADS, OUT_OF_HEADS = "in heads dim", "heads dim out"


class Actor(NamedTuple):
    """How the models of a trainer's family keep their weights.

    Attributes:
      names: the table, given the paths of a model's arrays: families have variants.
      adapted: what an array stands for in a checkpoint, by the last two parts of its path, where
        that is not the array itself.
      inputs: the axis of a matrix's inputs, by the same; elsewhere they come first.
      rounds_tied_head: logits of tied embeddings are those of a table rounded to bfloat16, while
        the embeddings themselves are not rounded. In float32 these are two matrices.
    """

    names: Callable[[Collection[str]], Names]
    adapted: Mapping[str, Callable[[Array], Array]] = {}
    inputs: Mapping[str, int] = {}
    rounds_tied_head: bool = False

    def target_config(self, config: ModelConfig, dtype: DTypeLike) -> ModelConfig:
        """The config of a target in this dtype that computes what the actor of ``config`` does."""
        if self.rounds_tied_head and jnp.dtype(dtype) == jnp.float32:
            return dataclasses.replace(config, tie_word_embeddings=False)
        return config


def actor_of(names: str | Names) -> Actor:
    """The actor of this name, or of a table. Raises ValueError for an unknown name."""
    return actor_named(names) if isinstance(names, str) else Actor(lambda paths: names)


def path_of(name: str, table: Names) -> str | None:
    """Where a table has a tensor that is not a layer's."""
    found = table.get(name)
    return found[0] if isinstance(found, tuple) else found


def with_rounded_head(
    arrays: Mapping[str, Array], table: Names
) -> tuple[dict[str, Array], dict[str, str | tuple[str, str]]]:
    """Arrays and table with an LM head: the embeddings rounded to bfloat16, in their own dtype.

    XLA may leave out a conversion to bfloat16 and back, but no reduction of precision.
    """
    embeddings, head = path_of(EMBED, table), "rounded_embeddings"
    if embeddings is None or embeddings not in arrays:
        return dict(arrays), dict(table)  # what is not there is refused later
    rounded = lax.reduce_precision(arrays[embeddings], exponent_bits=8, mantissa_bits=7)
    return {**arrays, head: rounded}, {**table, HEAD: (head, "out in")}


def tail(path: str) -> str:
    """The last two parts of a path."""
    return ".".join(path.split(".")[-2:])


def _tunix(paths: Collection[str], *, biases: bool = False, norms: bool = False) -> Names:
    """Llama 3, Qwen 2 and 3."""
    names: dict[str, str | tuple[str, str]] = {
        EMBED: ("embedder.input_embedding", "out in"),
        HEAD: ("lm_head.w", "in out"),
        NORM: "final_norm.w",
        f"{ATTENTION}o_proj.weight": ("layers.{i}.attn.o_proj.w", OUT_OF_HEADS),
    }
    for part in "qkv":
        path = f"layers.{{i}}.attn.{part}"
        names[f"{ATTENTION}{part}_proj.weight"] = (f"{path}_proj.w", INTO_HEADS)
        if biases:
            names[f"{ATTENTION}{part}_proj.bias"] = f"{path}_bias"
        if norms and part != "v":
            names[f"{ATTENTION}{part}_norm.weight"] = f"{path}_norm.w"
    for part in ("gate", "up", "down"):
        names[f"{MLP}{part}_proj.weight"] = (f"layers.{{i}}.mlp.{part}_proj.kernel", "in out")
    for part in ("input", "post_attention"):
        names[f"{LAYER}{part}_layernorm.weight"] = f"layers.{{i}}.{part}_layernorm.w"
    return names


def _tunix_gemma(paths: Collection[str]) -> Names:
    """Gemma and Gemma 2. Queries, keys and values are one array where they have as many heads."""
    attention = "layers.{i}.attn."
    names: dict[str, str | tuple[str, str]] = {
        EMBED: ("embedder.input_embedding", "out in"),
        NORM: "final_norm.scale",
        f"{ATTENTION}o_proj.weight": (f"{attention}attn_vec_einsum.w", OUT_OF_HEADS),
        f"{LAYER}input_layernorm.weight": "layers.{i}.pre_attention_norm.scale",
    }
    together = any(path.endswith("qkv_einsum.w") for path in paths)
    parts = ["qkv_einsum.w[0]", "qkv_einsum.w[1]", "qkv_einsum.w[2]"]
    for part, path in zip("qkv", parts if together else GROUPED, strict=True):
        names[f"{ATTENTION}{part}_proj.weight"] = (f"{attention}{path}", "heads in dim")
    for part in ("gate", "up", "down"):
        names[f"{MLP}{part}_proj.weight"] = (f"layers.{{i}}.mlp.{part}_proj.kernel", "in out")
    if any(path.endswith("post_attn_norm.scale") for path in paths):  # Gemma 2
        norms = {
            "post_attention": "post_attn",
            "pre_feedforward": "pre_ffw",
            "post_feedforward": "post_ffw",
        }
    else:
        norms = {"post_attention": "pre_ffw"}
    for name, path in norms.items():
        names[f"{LAYER}{name}_layernorm.weight"] = f"layers.{{i}}.{path}_norm.scale"
    return names


GROUPED = ("q_einsum.w", "kv_einsum.w[0]", "kv_einsum.w[1]")


def _maxtext(paths: Collection[str], *, norms: bool = False) -> Names:
    """Layers that are scanned along the second axis, or have a path each. An adapter puts ``base``
    before all paths."""
    base = "base." if any(path.startswith("base.") for path in paths) else ""
    scanned = any(".layers.mlp." in path for path in paths)
    layer, row = ("layers.", "[:,{i}]") if scanned else ("layers_{i}.", "")
    layer = f"{base}decoder.{layer}"
    names: dict[str, str | tuple[str, str]] = {
        EMBED: (f"{base}token_embedder.embedding", "out in"),
        HEAD: (f"{base}decoder.logits_dense.kernel", "in out"),
        NORM: f"{base}decoder.decoder_norm.scale",
        f"{ATTENTION}o_proj.weight": (f"{layer}self_attention.out.kernel{row}", OUT_OF_HEADS),
        f"{LAYER}input_layernorm.weight": f"{layer}pre_self_attention_layer_norm.scale{row}",
        f"{LAYER}post_attention_layernorm.weight": (
            f"{layer}post_self_attention_layer_norm.scale{row}"
        ),
    }
    for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
        path = f"{layer}self_attention.{name}"
        names[f"{ATTENTION}{part}_proj.weight"] = (f"{path}.kernel{row}", INTO_HEADS)
        if norms and part != "v":
            names[f"{ATTENTION}{part}_norm.weight"] = f"{path}_norm.scale{row}"
    for part, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
        names[f"{MLP}{part}_proj.weight"] = (f"{layer}mlp.{name}.kernel{row}", "in out")
    return names


def _halves(kernel: Array) -> Array:
    """A projection into heads [..., H] whose pairs of rotary dimensions are neighbours, with one
    half of each pair after the other, as checkpoints have them."""
    return jnp.concatenate([kernel[..., ::2], kernel[..., 1::2]], axis=-1)


def _unscaled(kernel: Array) -> Array:
    """Without the factor 1/sqrt(H) that MaxText keeps in queries without a norm."""
    return (kernel.astype(jnp.float32) * math.sqrt(kernel.shape[-1])).astype(kernel.dtype)


ACTORS: Mapping[str, Actor] = {
    "tunix.llama3": Actor(_tunix),
    "tunix.qwen2": Actor(functools.partial(_tunix, biases=True)),
    "tunix.qwen3": Actor(functools.partial(_tunix, norms=True)),
    "tunix.gemma": Actor(
        _tunix_gemma, inputs={"q_einsum.w": 1, "kv_einsum.w": 2, "qkv_einsum.w": 2}
    ),
    "maxtext.llama": Actor(_maxtext, adapted={"query.kernel": _unscaled}, rounds_tied_head=True),
    "maxtext.llama3.1": Actor(
        _maxtext,
        adapted={"query.kernel": lambda x: _halves(_unscaled(x)), "key.kernel": _halves},
        rounds_tied_head=True,
    ),
    "maxtext.qwen3": Actor(functools.partial(_maxtext, norms=True), rounds_tied_head=True),
}


def actor_named(name: str) -> Actor:
    """Raises ValueError for an unknown name."""
    if name not in ACTORS:
        raise ValueError(f"names is {name!r}: give a table, or one of {', '.join(ACTORS)}")
    return ACTORS[name]
