"""The engine as pure functions over pytrees, for use inside your own ``jit``, ``vmap`` or ``scan``.

``params`` holds the weights and every static choice, ``state`` everything that changes:

    params = load("model-dir", drafter="ngram")
    state = init_state(params, batch=1, max_length=512)
    state = prefill(params, state, tokens, counts)
    state = decode(params, state, num_rounds=100)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxspec import collectives
from jaxspec.cache import init_layers, page_slots, pages_for, sequential_page_table
from jaxspec.config import SpeculationConfig
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.pytree import pytree, static
from jaxspec.sampling import Sampling, make_sampling, perturb, process_logits, vocab_ids
from jaxspec.sharding import (
    DATA_AXIS,
    DATA_PARALLEL,
    TENSOR_PARALLEL,
    data_size,
    named_shardings,
    partition_specs,
)
from jaxspec.speculation.drafters import Drafter, PrefillChunk
from jaxspec.speculation.round import run_round
from jaxspec.state import EngineState, empty_statistics


@pytree
class EngineParams:
    """A target, a drafter, and how they work together. ``mesh`` None: one device."""

    target: Decoder
    drafter: Drafter
    speculation: SpeculationConfig = static()
    mesh: Mesh | None = static(default=None)


def init_state(
    params: EngineParams,
    batch: int,
    max_length: int,
    *,
    page_size: int = 16,
    sampling: Sampling | None = None,
    max_lens: Array | None = None,
    stop_token_ids: Array | tuple[int, ...] = (),
    page_table: Array | None = None,
    num_pages: int | None = None,
) -> EngineState:
    """An empty state for ``batch`` sequences of at most ``max_length`` tokens each.

    Args:
      sampling: as made by make_sampling; greedy by default.
      max_lens: [B] most tokens of each sequence, prompt included; ``max_length`` by default.
      stop_token_ids: ids that end a sequence: a tuple for all, or [B, E] padded with -1.
      page_table: [B, M] pages of each sequence; by default each has a run of its own, with room
        for ``max_length`` tokens and the tree beyond them.
      num_pages: pages in all, null page included; goes with ``page_table``.

    Raises ValueError when ``batch`` cannot be split over the mesh, the table is too narrow, or the
    tree too deep for a sliding window.
    """
    params.target.config.check_tree_depth(params.speculation.max_depth)
    data_parallel = data_size(params.mesh)
    if batch % data_parallel:
        raise ValueError(f"a batch of {batch} cannot be split over {data_parallel} data shards")
    needed = pages_for(max_length + params.speculation.scratch_slots, page_size)
    if page_table is None:
        page_table = sequential_page_table(batch, needed, data_parallel)
        num_pages = batch * needed + data_parallel
    if num_pages is None:
        raise ValueError("a page_table of your own needs num_pages beside it")
    if page_table.shape[1] < needed:
        raise ValueError(
            f"{max_length} tokens and {params.speculation.scratch_slots} tree slots need {needed} "
            f"pages of {page_size}, the page table has {page_table.shape[1]}"
        )
    target, config = params.target, params.target.config
    cache = init_layers(
        config.num_layers,
        num_pages,
        target.layers[0].qkv.shape[1],
        page_size,
        config.head_dim,
        target.embed.dtype,
        params.mesh,
        sharded_heads=target.axis is not None,
    )
    state = EngineState(
        tokens=jnp.zeros((batch, max_length), jnp.int32),
        context_lens=jnp.zeros(batch, jnp.int32),
        max_lens=jnp.full(batch, max_length, jnp.int32) if max_lens is None else max_lens,
        active=jnp.zeros(batch, bool),
        stop_tokens=_stop_table(stop_token_ids, batch),
        page_table=page_table,
        cache=cache,
        draft=params.drafter.init_state(batch, num_pages, page_size, params.mesh),
        sampling=make_sampling(batch) if sampling is None else sampling,
        stats=empty_statistics(batch, params.drafter.max_depth),
    )
    return state if params.mesh is None else _place(params.mesh, target, state)


def _stop_table(stop_token_ids: Array | tuple[int, ...], batch: int) -> Array:
    if not isinstance(stop_token_ids, tuple):
        return stop_token_ids
    ids = jnp.array(stop_token_ids or (-1,), jnp.int32)
    return jnp.broadcast_to(ids, (batch, ids.size))


def _place(mesh: Mesh, target: Decoder, state: EngineState) -> EngineState:
    return jax.tree.map(jax.device_put, state, named_shardings(mesh, state, _rules(target)))


def _rules(target: Decoder) -> dict[str, str]:
    """Sharding rules of the state: KV heads follow the target's."""
    return TENSOR_PARALLEL if target.axis is not None else DATA_PARALLEL


def prefill(
    params: EngineParams, state: EngineState, tokens: ArrayLike, counts: ArrayLike
) -> EngineState:
    """Read prompt tokens, and sample the token that follows them.

    A long prompt may be read in several calls: each overwrites the token sampled by the one
    before. Prompts are read before the first ``decode``: a drafter's own cache knows nothing of the
    rounds between.

    Args:
      tokens: [B, T] int32; the first ``counts`` [B] of each row continue its sequence. Rows of
        count 0 are left as they are.

    Raises ValueError if T exceeds the state's length.
    """
    tokens, counts = jnp.asarray(tokens, jnp.int32), jnp.asarray(counts, jnp.int32)
    if tokens.shape[1] > state.tokens.shape[1]:
        raise ValueError(
            f"a prompt of {tokens.shape[1]} tokens is longer than the cache "
            f"({state.tokens.shape[1]})"
        )
    batch_spec = P(DATA_AXIS)
    return _on_mesh(_prefill, params, state, (tokens, counts), (batch_spec, batch_spec))


def decode(params: EngineParams, state: EngineState, num_rounds: ArrayLike) -> EngineState:
    """Run up to ``num_rounds`` rounds; stops early when every sequence is done."""
    return _on_mesh(_decode, params, state, (jnp.asarray(num_rounds, jnp.int32),), (P(),))


def _on_mesh(
    function: Callable[..., EngineState],
    params: EngineParams,
    state: EngineState,
    arguments: tuple[Array, ...],
    specs: tuple[P, ...],
) -> EngineState:
    """Call ``function`` on each device's shards; collectives inside it are explicit."""
    if params.mesh is None:
        return function(params, state, *arguments)
    state_specs = partition_specs(state, _rules(params.target))
    sharded = jax.shard_map(
        function,
        mesh=params.mesh,
        in_specs=(partition_specs(params), state_specs, *specs),
        out_specs=state_specs,
        check_vma=False,
    )
    return sharded(params, state, *arguments)


def _prefill(params: EngineParams, state: EngineState, tokens: Array, counts: Array) -> EngineState:
    target = params.target
    offset = jnp.arange(tokens.shape[1])
    positions = state.context_lens[:, None] + offset
    valid = offset < counts[:, None]
    attend = PagedAttend(
        page_table=state.page_table,
        context_lens=state.context_lens,
        slots=page_slots(state.page_table, positions, valid, state.page_size),
        positions=positions,
    )
    hidden, cache, features = decoder.run(
        target, tokens, positions, state.cache, attend, params.drafter.capture
    )
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    logits = decoder.logits(target, jnp.take_along_axis(hidden, last, axis=1))
    context_lens = state.context_lens + counts
    roots = _sample(logits, state.sampling, context_lens, target.axis)
    changed = counts > 0
    done = jnp.any(roots[:, None] == state.stop_tokens, axis=1)
    done |= context_lens + 1 >= state.max_lens
    chunk = PrefillChunk(tokens, counts)
    return EngineState(
        tokens=_append(state, tokens, counts, roots),
        context_lens=context_lens,
        max_lens=state.max_lens,
        active=jnp.where(changed, ~done, state.active),
        stop_tokens=state.stop_tokens,
        page_table=state.page_table,
        cache=cache,
        draft=params.drafter.prefill(target, state, chunk, features),
        sampling=state.sampling,
        stats=state.stats,
    )


def _sample(logits: Array, sampling: Sampling, positions: Array, axis: str | None) -> Array:
    """Sample [B] tokens at ``positions`` [B] from raw logits [B, 1, V / shards]."""
    processed = process_logits(logits, sampling, axis)
    ids = vocab_ids(logits.shape[-1], axis)
    return collectives.argmax(perturb(processed, sampling, positions[:, None], ids), axis)[:, 0]


def _append(state: EngineState, tokens: Array, counts: Array, roots: Array) -> Array:
    """The token buffer with a chunk and the token sampled after it."""
    batch, width = tokens.shape
    row = jnp.arange(batch)[:, None]
    offset = jnp.arange(width + 1)
    written = jnp.concatenate([tokens, roots[:, None]], axis=1)
    written = jnp.where(offset == counts[:, None], roots[:, None], written)
    kept = (offset <= counts[:, None]) & (counts > 0)[:, None]
    position = jnp.where(kept, state.context_lens[:, None] + offset, state.tokens.shape[1])
    return state.tokens.at[row, position].set(written, mode="drop")


def _decode(params: EngineParams, state: EngineState, num_rounds: Array) -> EngineState:
    def unfinished(carry: tuple[Array, EngineState]) -> Array:
        index, state = carry
        active = jnp.any(state.active)
        if data_size(params.mesh) > 1:
            active = lax.pmax(active.astype(jnp.int32), DATA_AXIS) > 0
        return (index < num_rounds) & active

    def body(carry: tuple[Array, EngineState]) -> tuple[Array, EngineState]:
        index, state = carry
        return index + 1, run_round(params.target, params.drafter, params.speculation, state)

    start: Any = (jnp.int32(0), state)
    return lax.while_loop(unfinished, body, start)[1]
