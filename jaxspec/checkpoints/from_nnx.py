"""Targets from the actors of trainers in JAX: Tunix, MaxText, or any nnx model with a table."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.checkpoints.flax_bridge import Names, flat_arrays, target_from_flax
from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.checkpoints.maxtext_config import check_maxtext
from jaxspec.checkpoints.nnx_names import (
    EMBED,
    HEAD,
    Actor,
    actor_of,
    path_of,
    tail,
    with_rounded_head,
)
from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.parallel import Shards, mesh_layout, named_shardings
from jaxspec.parallel.moving import without_explicit_axes

LORA_A, LORA_B = "_lora_a", "_lora_b"


class Lora(NamedTuple):
    """How the LoRA weights of an actor count: ``alpha / rank`` times a @ b. Its state does not say.

    Attributes:
      alpha: of the provider that made the actor, as ``qwix.LoraProvider`` has it.
      rank: the same; it must be that of the arrays.
    """

    alpha: float
    rank: int


def from_nnx(
    model_or_state: Any,
    config: ModelConfig | Mapping[str, Any] | None = None,
    *,
    names: str | Names,
    lora: Lora | tuple[float, int] | None = None,
    like: Decoder | None = None,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
) -> Decoder:
    """A target with the weights of a trainer's actor, for ``jaxspec.load(target=)``, ``use_target``
    and ``token_logprobs``.

    It is computed on the devices, and can be traced: ``jax.jit`` of a function of an nnx.State that
    calls it makes one program. Without that, arrays that a checkpoint has as the actor does are not
    copied; see Engine.use_target for who may donate them. From a trainer's mesh to another one
    weights move from device to device.

    Check the result once with ``check_against``: what a config says and the actor does not do, as
    a rotary base, is seen by nothing else.

    Args:
      model_or_state: an nnx.Module, whose nnx.Param are taken; or an nnx.State or dict of arrays.
      config: of the model, or what its config.json has. None: that of ``like``.
      names: ``tunix.llama3``, ``tunix.qwen2``, ``tunix.qwen3``, ``tunix.gemma`` (also Gemma 2),
        ``maxtext.llama`` (MaxText's rope_type is default), ``maxtext.llama3.1`` (it is llama3.1),
        ``maxtext.qwen3``, of dense models; or a table, see target_from_flax.
      lora: alpha and rank; LoRA weights of the actor (``w_lora_a`` [in, rank], ``w_lora_b``
        [rank, out] of ``w``) are merged in float32. The weights beside them must be there, too.
      like: a target whose shapes, dtypes and shardings it gets: of arrays or shapes.
      mesh: that of the engine, if there is no ``like``. None: it stays where the actor is.
      dtype: float32 or bfloat16, if there is no ``like``. None: that of the actor's embeddings.

    MaxText rounds tied embeddings to bfloat16 for the logits: a target of it in float32 has an LM
    head of its own, and a config that says so.

    Raises ValueError for missing, misshapen and surplus arrays (see target_from_flax), for LoRA
    weights without ``lora`` or of another rank, for a model of MaxText whose config does not fit
    ``names``, and for arguments that do not go together.
    """
    actor = actor_of(names)
    state = model_or_state
    if isinstance(model_or_state, nnx.Module):
        check_maxtext(names, model_or_state)
        state = nnx.state(model_or_state, nnx.Param)
    if config is not None and not isinstance(config, ModelConfig):
        config = parse_model_config(config)
    arrays = {path: without_explicit_axes(x) for path, x in flat_arrays(state).items()}
    arrays = _merged(arrays, actor, lora)
    arrays = {path: actor.adapted.get(tail(path), _same)(array) for path, array in arrays.items()}
    table = actor.names(arrays)
    if like is None:
        like = _shapes(actor, config, mesh, dtype or _dtype_of(arrays, table))
    else:
        _check_like(actor, like, config, mesh, dtype)
    if actor.rounds_tied_head and not like.config.tie_word_embeddings:
        is_tied = path_of(HEAD, table) not in arrays
        if is_tied if config is None else config.tie_word_embeddings:
            arrays, table = with_rounded_head(arrays, table)
    return target_from_flax(like, arrays, table)


def target_config(config: ModelConfig, names: str | Names, dtype: DTypeLike) -> ModelConfig:
    """That of the target in this dtype which from_nnx makes of an actor of ``config``."""
    return actor_of(names).target_config(config, dtype)


def _same(array: Array) -> Array:
    return array


def _merged(
    arrays: Mapping[str, Array], actor: Actor, lora: Lora | tuple[float, int] | None
) -> dict[str, Array]:
    """The arrays with those of LoRA added to the weights that they are of."""
    paths = [path.removesuffix(LORA_A) for path in arrays if path.endswith(LORA_A)]
    if not paths:
        if lora is not None:
            raise ValueError("lora is given, and the actor has no LoRA weights")
        return dict(arrays)
    if lora is None:
        rank = arrays[paths[0] + LORA_A].shape[-1]
        raise ValueError(
            f"the actor has LoRA weights of rank {rank}: give lora=Lora(alpha, rank), which its "
            "state does not say"
        )
    merged = {path: array for path, array in arrays.items() if not path.endswith((LORA_A, LORA_B))}
    for path in paths:
        if path not in merged:
            raise ValueError(
                f"{path} is not there, of which the state has LoRA weights: give the whole state"
            )
        a, b = arrays[path + LORA_A], arrays[path + LORA_B]
        axis = actor.inputs.get(tail(path), 0)
        merged[path] = _with_lora(path, merged[path], a, b, axis, Lora(*lora))
    return merged


def _with_lora(path: str, weight: Array, a: Array, b: Array, axis: int, lora: Lora) -> Array:
    """The weight with a [*in, r] @ b [r, *out]; ``axis`` is the first of its inputs'."""
    if a.shape[-1] != lora.rank:
        raise ValueError(f"{path} has LoRA weights of rank {a.shape[-1]}, lora says {lora.rank}")
    change = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1)
    change = jnp.moveaxis(change, 0, axis)
    if change.shape != weight.shape:
        raise ValueError(
            f"{path} is {list(weight.shape)}, its LoRA weights are {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    return (weight.astype(jnp.float32) + lora.alpha / lora.rank * change).astype(weight.dtype)


def _shapes(
    actor: Actor, config: ModelConfig | None, mesh: Mesh | None, dtype: DTypeLike
) -> Decoder:
    """Those of a target, with shardings on a mesh."""
    if config is None:
        raise ValueError("give the config of the model, or a target like it")
    dtype = resolve_dtype(dtype)
    config = actor.target_config(config, dtype)
    shapes = decoder_shapes(config, dtype, Shards.over(mesh, mesh_layout(mesh)))
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        named_shardings(mesh, shapes),
    )


def _dtype_of(arrays: Mapping[str, Array], table: Names) -> Any:
    path = path_of(EMBED, table)
    if path is None or path not in arrays:
        raise ValueError(f"the embeddings should be at {path}, which is not there")
    return arrays[path].dtype


def _check_like(
    actor: Actor,
    like: Decoder,
    config: ModelConfig | None,
    mesh: Mesh | None,
    dtype: DTypeLike | None,
) -> None:
    if mesh is not None or dtype is not None:
        raise ValueError("like says where weights go, and their dtype: leave out mesh and dtype")
    if actor.target_config(like.config, like.dtype) != like.config:
        raise ValueError(
            "like ties its LM head to its embeddings, of which MaxText rounds the LM head: in "
            "float32 give a target that from_nnx made of such an actor and a config"
        )
    if config is not None and actor.target_config(config, like.dtype) != like.config:
        raise ValueError("like is a target of another config than the one that is given")
