"""A model as a function of whole sequences, for losses: no cache, and gradients of the weights.

The same layers run that an engine runs. On a mesh XLA divides the work as the weights are divided,
so that a gradient is that of one device whatever the layout.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend
from jaxspec.models.linear import Linear
from jaxspec.models.mixers import Attention
from jaxspec.models.nodes import map_nodes
from jaxspec.parallel import WHOLE, axes_size, check_divides, mesh_layout, named_shardings
from jaxspec.parallel.array_checks import Integers, checked_texts
from jaxspec.parallel.pytree import array_text


def forward(
    target: Decoder,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mesh: Mesh | None = None,
    remat: bool = False,
) -> Array:
    """Logits of every token's successor: float32 [B, T, V], raw, as the model gives them.

    Logits of one token are V numbers: where log-probabilities are wanted, token_logprobs needs a
    fraction of the memory. For the arguments and errors see hidden_states. Past a row's length
    logits are 0.
    """
    hidden = hidden_states(target, tokens, lengths, mesh=mesh, remat=remat)
    logits = logits_of(target, hidden, mesh)
    return within(lengths, logits[..., : target.config.vocab_size])


def hidden_states(
    target: Decoder,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    mesh: Mesh | None = None,
    remat: bool = False,
) -> Array:
    """Hidden states after the final norm, which the LM head reads: [B, T, H] in the target's dtype.

    A pure function of arrays, for ``jit``, ``vmap`` and ``scan``. It can be differentiated by the
    target: ``jax.grad`` of a function of it gives a Decoder of gradients. KV heads that a mesh
    repeats are tied: each copy gets the sum of all copies' gradients, that of the head on one
    device, so that equal steps keep them equal. (Norms of gradients count each copy.) The cache's
    scales, of an 8-bit cache, change nothing here.

    Weights of integers or of 8-bit floats have no gradient. With such a target this function works,
    and differentiating it is an error that names the weights. (``jax.grad`` by a tree with integers
    is an error of jax, unless ``allow_int=True``.)

    Args:
      target: a whole Decoder, as ``jaxspec.load(...).target``.
      tokens: integers [B, T], at positions 0 to T - 1: padding stands after the text.
      lengths: integers [B], 0 to T: tokens of each row; None: all. Results past them are 0, and
        what ``tokens`` has there is not read.
      mesh: of the target, if it was loaded on one (jaxspec.make_mesh). Rows are then split over
        its data axis. A target that was placed on a trainer's own mesh needs none.
      remat: keep hidden states between layers only, and compute a layer again for its gradient.
        Attention writes the scores of a layer, [B, Q, T, T].

    Raises ValueError for other shapes and dtypes, more tokens than the model has positions, known
    tokens outside of the vocabulary or lengths out of range, a target of another mesh, rows that
    cannot be split over the data axis, and a part of a pipeline.
    """
    if not isinstance(target, Decoder):
        kind = type(target).__name__
        raise ValueError(f"target must be a Decoder, as jaxspec.load(...).target is, not {kind}")
    ids, lens = checked_texts(target.config.vocab_size, tokens=tokens, lengths=lengths)
    target.config.check_length(ids.shape[1])
    ids = within(lens, ids)
    _checked_mesh(target, mesh, len(ids))
    whole = map_nodes(_whole(target, mesh), _with_tied_heads, Attention)
    hidden = of_whole_sequences(whole, _split(ids, mesh, "batch", "length"), remat=remat)
    hidden = _split(hidden, mesh, "batch", "length", "whole_hidden")
    if (why := undifferentiable(target)) is not None:
        hidden = _refusing_gradients(hidden, why)
    return within(lengths, hidden)


def of_whole_sequences(
    target: Decoder,
    tokens: Array,
    attend: Attend = dense_causal_attend,
    *,
    remat: bool = False,
) -> Array:
    """Hidden states after the final norm [B, T, H] of tokens [B, T] at positions 0 to T - 1, by a
    target that is not split: what training and ``hidden_states`` share."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if remat:
        layers = tuple(layer.replace(recomputed=True) for layer in target.layers)
        target = target.replace(layers=layers)
    hidden, _, _ = decoder.run(target, tokens, positions, target.no_states(), attend)
    return hidden


def logits_of(target: Decoder, hidden: Array, mesh: Mesh | None = None) -> Array:
    """Raw logits float32 [B, T, V] of hidden states [B, T, H], as ``hidden_states`` gives them.

    Where a mesh pads the vocabulary they have its columns, too, of -inf.
    """
    logits = decoder.logits(_whole(target, mesh), hidden)
    return _split(logits, mesh, "batch", "length", "vocab")


def within(lengths: Integers | None, values: Array) -> Array:
    """Values [B, T, ...] of tokens, 0 past each row's length."""
    if lengths is None:
        return values
    inside = jnp.arange(values.shape[1]) < jnp.asarray(lengths)[:, None]
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (values.ndim - 2)), values, 0)


def _checked_mesh(target: Decoder, mesh: Mesh | None, num_rows: int) -> None:
    """Raises ValueError for a target that is not split as the mesh says, for rows that cannot be
    split over it, and for a part of a pipeline."""
    if len(target.layers) != target.config.num_layers:
        raise ValueError("the target has some of its layers: a pipeline has no forward, take tp")
    if target.layout != mesh_layout(mesh):
        found = "is split over a mesh" if mesh is None else "is not split as mesh says"
        raise ValueError(f"the target {found}: give the mesh that it was loaded with")
    check_divides("the number of rows", num_rows, axes_size(mesh, target.layout.batch))


def _whole(target: Decoder, mesh: Mesh | None) -> Decoder:
    """The target as one device sees it. Its arrays stay split over the mesh, and so do their
    gradients."""
    if mesh is not None:
        target = lax.with_sharding_constraint(target, named_shardings(mesh, target))
    return target.replace(layout=WHOLE)


def _split(values: Array, mesh: Mesh | None, *axes: str) -> Array:
    """The values, split over the mesh as such logical axes are."""
    if mesh is None:
        return values
    sharding = NamedSharding(mesh, mesh_layout(mesh).spec(axes))
    return lax.with_sharding_constraint(values, sharding)


# Gradients.


def _with_tied_heads(attention: Attention) -> Attention:
    """The same attention; if its KV heads are repeated, copies share their gradients."""
    qkv, repeats = attention.qkv, attention.qkv.out_shape[0] // attention.config.num_kv_heads
    if repeats == 1 or not isinstance(qkv, Linear):
        return attention
    bias, norm = qkv.bias, attention.qk_norm
    members = 1 if attention.config.values_are_keys else 2
    return attention.replace(
        qkv=qkv.replace(
            weight=_tied(qkv.weight, repeats, members),
            bias=None if bias is None else _tied(bias, repeats, members),
        ),
        qk_norm=None if norm is None else _tied(norm, repeats, 1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _tied(weights: Array, repeats: int, members: int) -> Array:
    """Weights [..., G, R, D] whose last ``members`` of R are alike in ``repeats`` neighbours of G:
    the gradient of each is the sum over them."""
    return weights


def _tied_forward(weights: Array, repeats: int, members: int) -> tuple[Array, None]:
    return weights, None


def _tied_backward(repeats: int, members: int, kept: None, gradient: Array) -> tuple[Array]:
    *outer, groups, _, size = gradient.shape
    shape = *outer, groups // repeats, repeats, members, size
    copies = gradient[..., -members:, :]
    total = jnp.broadcast_to(copies.reshape(shape).sum(axis=-3, keepdims=True), shape)
    return (gradient.at[..., -members:, :].set(total.reshape(copies.shape)),)


_tied.defvjp(_tied_forward, _tied_backward)


def undifferentiable(target: Decoder) -> str | None:
    """What of a target has no gradient, in words; None if all has one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.replace(exchange=None)):
        dtype = jnp.result_type(leaf)
        if not (jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16):
            name = jax.tree_util.keystr(path).lstrip(".")
            return (
                f"the target is quantized, so it has no gradient: {name} is {array_text(leaf)}; "
                "differentiate the weights that it was made of"
            )
    return None


def _refusing_gradients(values: Array, why: str) -> Array:
    """The values; differentiating them raises ValueError that says why."""

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise ValueError(why)

    return same(values)
