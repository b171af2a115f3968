"""The gated delta rule on Hopper GPUs: a warpgroup per row, value head and 64 columns of its state.

The columns of a state do not depend on each other. A warpgroup holds 64 of them in registers, as
the rows of a tile, and applies tokens one by one, in their order.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.delta_rule.tokens import RowStates, Tokens
from pallas_kernels.mosaic_module_names import fixed_name

COLUMNS = 64  # of a value head, that a warpgroup holds
TILE = plgpu.Layout.WGMMA  # [COLUMNS, Dk]: four threads share a column of the state
BY_COLUMN, BY_KEY = TILE.reduce(1), TILE.reduce(0)
THREADS = 128  # of a warpgroup
FEW_NODES = 4  # of a tree whose keys are multiplied here: two launches less


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("interpret",))
def delta_read_mosaic(
    states: RowStates,
    q: Array,  # [B, N, G, Dk]
    nodes: Tokens,  # [B, N, ...]
    ancestors: Array,  # [B, N, N]
    depth: Array,  # [B, N]
    *,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.delta_rule.delta_read; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    s, window, rows, held = states
    _, groups, values, v_dim, k_dim = s.shape
    batch, size = q.shape[:2]
    grams = () if size <= FEW_NODES else (_gram(q, nodes.k),)
    level = jnp.arange(size)[:, None]
    at_level = ancestors[:, :, None] & (depth[:, None, None] == level)  # [B, N, levels, N]
    ancestor_at = jnp.argmax(at_level, axis=-1).astype(jnp.int32)

    @fixed_name(interpret)
    def delta_read_kernel(
        s_ref, wk_ref, wv_ref, wg_ref, wb_ref, rows_ref, held_ref, q_ref, k_ref, v_ref, g_ref,
        b_ref, ancestor_ref, depth_ref, *refs,
    ):  # fmt: skip
        *gram_refs, out_ref, written_ref = refs
        sequence, group = kernel_axes.index("sequence"), kernel_axes.index("group")
        value, columns = _part(kernel_axes.index("part"), values)
        row, count = jnp.minimum(rows_ref[sequence], len(s) - 1), held_ref[sequence]
        window = Tokens(wk_ref, wv_ref, wg_ref, wb_ref)

        def apply(place: Any, carry: Any) -> Any:
            tile, token = carry
            last = jnp.maximum(count - 1, 0)
            following = _token(window, row, jnp.minimum(place + 1, last), group, value, columns)
            return _applied(tile, token), following

        tile = _load(s_ref.at[row, group, value, columns], TILE)
        first = _token(window, row, 0, group, value, columns)
        tile, _ = lax.fori_loop(0, count, apply, (tile, first))

        @pl.loop(0, size)
        def _node(node):
            key, query = (_load(ref.at[sequence, node, group], BY_KEY) for ref in (k_ref, q_ref))

            def products(above: Any) -> tuple[Array, ...]:
                """Products of this node's key and query with the key of a node above."""
                if gram_refs:
                    [gram] = gram_refs
                    return tuple(gram[sequence, group, x, node, above] for x in range(2))
                other = _load(k_ref.at[sequence, above, group], BY_KEY)
                return _product(other, key), _product(other, query)

            def after(level: Any, reads: tuple[Array, Array]) -> tuple[Array, Array]:
                above = ancestor_ref[sequence, node, level]
                decay = jnp.exp(g_ref[sequence, above, group, value])
                written = _load(written_ref.at[above], BY_COLUMN)
                by_k, by_q = products(above)
                return decay * reads[0] + by_k * written, decay * reads[1] + by_q * written

            reads = _read(tile, key), _read(tile, query)
            by_key, by_query = lax.fori_loop(0, depth_ref[sequence, node], after, reads)
            decay = jnp.exp(g_ref[sequence, node, group, value])
            v = _load(v_ref.at[sequence, node, group, value, columns], BY_COLUMN)
            written = b_ref[sequence, node, group, value] * (v - decay * by_key)
            written_ref[node] = written
            out_ref[sequence, node, group, value, columns] = (
                decay * by_query + _product(key, query) * written
            )

    kernel = plgpu.kernel(
        delta_read_kernel,
        out_type=jax.ShapeDtypeStruct((batch, size, groups, values, v_dim), jnp.float32),
        scratch_types=[plgpu.SMEM((size, COLUMNS), jnp.float32)],
        grid=(values * v_dim // COLUMNS, groups, batch),
        grid_names=kernel_axes.names("part", "group", "sequence"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(s, *window, rows, held, q, *nodes, ancestor_at, depth, *grams)


def _gram(q: Array, k: Array) -> Array:
    """Products with the keys of all nodes, of keys and of queries: [B, G, 2, N, N]."""
    readers = jnp.stack([k, q], axis=1)
    return jnp.einsum("bxigd,bjgd->bgxij", readers, k, precision=lax.Precision.HIGHEST)


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("interpret",))
def delta_run_mosaic(
    states: RowStates,
    counts: Array,  # [B]
    q: Array,  # [B, T, G, Dk]
    tokens: Tokens,  # [B, T, ...]
    *,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.delta_rule.delta_run; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    s, window, rows, held = states
    _, groups, values, v_dim, _ = s.shape
    batch, size = q.shape[:2]
    capacity = window.k.shape[1]

    @fixed_name(interpret)
    def delta_run_kernel(
        wk_ref, wv_ref, wg_ref, wb_ref, rows_ref, held_ref, counts_ref, q_ref, k_ref, v_ref, g_ref,
        b_ref, s_ref, out_ref,
    ):  # fmt: skip
        sequence, group = kernel_axes.index("sequence"), kernel_axes.index("group")
        value, columns = _part(kernel_axes.index("part"), values)
        row, count = jnp.minimum(rows_ref[sequence], len(s) - 1), counts_ref[sequence]
        first = held_ref[sequence]
        until = jnp.maximum((first + count) // capacity * capacity - first, 0)
        old = functools.partial(_token, Tokens(wk_ref, wv_ref, wg_ref, wb_ref), row)
        new = functools.partial(_token, Tokens(k_ref, v_ref, g_ref, b_ref), sequence)
        part = group, value, columns

        def apply(place: Any, carry: Any) -> Any:
            tile, token = carry
            following = old(jnp.minimum(place + 1, first - 1), *part)
            return _applied(tile, token), following

        def read(index: Any, carry: Any) -> Any:
            tile, token = carry
            query = _load(q_ref.at[sequence, index, group], BY_KEY)
            following = new(jnp.minimum(index + 1, count - 1), *part)
            tile = _applied(tile, token)
            out_ref[sequence, index, group, value, columns] = _read(tile, query)
            return tile, following

        tile = _load(s_ref.at[row, group, value, columns], TILE)
        tile, _ = lax.fori_loop(0, first, apply, (tile, old(0, *part)))
        carry = lax.fori_loop(0, until, read, (tile, new(0, *part)))

        @pl.when(until > 0)  # at the last multiple of the window's size
        def _store():
            s_ref[row, group, value, columns] = carry[0]

        lax.fori_loop(until, count, read, carry)

        @pl.loop(count, size)
        def _pad(index):
            nothing = plgpu.layout_cast(jnp.zeros(COLUMNS, jnp.float32), BY_COLUMN)
            out_ref[sequence, index, group, value, columns] = nothing

    kernel = plgpu.kernel(
        delta_run_kernel,
        out_type=jax.ShapeDtypeStruct((batch, size, groups, values, v_dim), jnp.float32),
        grid=(values * v_dim // COLUMNS, groups, batch),
        grid_names=kernel_axes.names("part", "group", "sequence"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    s_ref = jax.new_ref(s)
    out = kernel(*window, rows, held, counts, q, *tokens, s_ref)
    return out, jax.freeze(s_ref)


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("interpret",))
def delta_commit_mosaic(
    states: RowStates,
    channels: Array,  # [R, K - 1, G, c]
    nodes: Tokens,  # [B, N, ...]
    node_channels: Array,  # [B, N, G, c or more]
    path: Array,  # [B, A]
    counts: Array,  # [B]
    *,
    interpret: Any = None,
) -> tuple[Array, Tokens, Array]:
    """See pallas_kernels.delta_rule.delta_commit; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    s, window, rows, held = states
    _, groups, values, v_dim, k_dim = s.shape
    capacity, past, width = window.k.shape[1], channels.shape[1], channels.shape[-1]
    parts = values * v_dim // COLUMNS
    of_key = plgpu.Layout.WG_STRIDED((k_dim,), vec_size=1)
    of_channels = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))

    @fixed_name(interpret)
    def delta_commit_kernel(
        rows_ref, held_ref, path_ref, counts_ref, k_ref, v_ref, g_ref, b_ref, new_ref, s_ref,
        wk_ref, wv_ref, wg_ref, wb_ref, channels_ref, folded,
    ):  # fmt: skip
        sequence, group, part = (kernel_axes.index(name) for name in ("sequence", "group", "part"))
        value, columns = _part(part, values)
        row, count = jnp.minimum(rows_ref[sequence], len(s) - 1), counts_ref[sequence]
        first = held_ref[sequence]
        until = jnp.maximum((first + count) // capacity * capacity - first, 0)
        window = Tokens(wk_ref, wv_ref, wg_ref, wb_ref)
        nodes = Tokens(k_ref, v_ref, g_ref, b_ref)

        def old(place: Any, tile: Array) -> Array:
            return _applied(tile, _token(window, row, place, group, value, columns))

        def new(place: Any, tile: Array) -> Array:
            node = path_ref[sequence, place]
            return _applied(tile, _token(nodes, sequence, node, group, value, columns))

        @pl.when(until > 0)  # up to the last multiple of the window's size
        def _fold():
            tile = _load(s_ref.at[row, group, value, columns], TILE)
            tile = lax.fori_loop(0, first, old, tile)
            s_ref[row, group, value, columns] = lax.fori_loop(0, until, new, tile)

        # The window's first tokens are overwritten once every part has applied them.
        plgpu.barrier_arrive(folded)
        plgpu.barrier_wait(folded)

        @pl.loop(0, count)
        def _append(index):
            node, place = path_ref[sequence, index], (first + index) % capacity
            wv_ref[row, place, group, value, columns] = _load(
                v_ref.at[sequence, node, group, value, columns], BY_COLUMN
            )

            @pl.when(part < values)
            def _strengths():
                wg_ref[row, place, group, value] = g_ref[sequence, node, group, value]
                wb_ref[row, place, group, value] = b_ref[sequence, node, group, value]

            @pl.when(part == 0)
            def _key():
                key = _load(k_ref.at[sequence, node, group], of_key)
                wk_ref[row, place, group] = key

        @pl.when((part == parts - 1) & (count > 0))
        def _channels():
            # Those that stay move to lower places, the lowest first.
            for tap in range(past):
                place = count + tap

                @pl.when(place < past)
                def _move(tap=tap, place=place):
                    source = channels_ref.at[row, jnp.minimum(place, past - 1), group]
                    channels_ref[row, tap, group] = _load(source, of_channels)

                @pl.when(place >= past)
                def _take(tap=tap, place=place):
                    node = path_ref[sequence, jnp.maximum(place - past, 0)]
                    taken = new_ref.at[sequence, node, group, pl.ds(0, width)]
                    channels_ref[row, tap, group] = _load(taken, of_channels)

    kernel = plgpu.kernel(
        delta_commit_kernel,
        out_type=(),
        scratch_types=[plgpu.Barrier(num_arrivals=parts)],
        grid=(groups, len(rows)),
        grid_names=kernel_axes.names("group", "sequence"),
        num_threads=parts,
        thread_name=kernel_axes.name("part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    refs = [jax.new_ref(array) for array in (s, *window, channels)]
    kernel(rows, held, path, counts, *nodes, node_channels, *refs)
    s, *kept, channels = (jax.freeze(ref) for ref in refs)
    return s, Tokens(*kept), channels


def _part(part: Any, values: int) -> tuple[Any, Any]:
    """The value head of a warpgroup, and its columns."""
    return part % values, pl.ds(part // values * COLUMNS, COLUMNS)


def _token(refs: Tokens, row: Any, place: Any, group: Any, value: Any, columns: Any) -> Tokens:
    """A token's inputs, as far as they concern these columns."""
    return Tokens(
        _load(refs.k.at[row, place, group], BY_KEY),
        _load(refs.v.at[row, place, group, value, columns], BY_COLUMN),
        refs.g[row, place, group, value],
        refs.beta[row, place, group, value],
    )


def _applied(tile: Array, token: Tokens) -> Array:
    """The state [COLUMNS, Dk] after a token."""
    tile = tile * jnp.exp(token.g)
    written = token.beta * (token.v - _read(tile, token.k))
    column = lax.broadcast_in_dim(written, tile.shape, (0,))
    return tile + column * lax.broadcast_in_dim(token.k, tile.shape, (1,))


def _read(tile: Array, x: Array) -> Array:
    """What x [Dk] reads from a state [COLUMNS, Dk]."""
    return jnp.sum(tile * lax.broadcast_in_dim(x, tile.shape, (1,)), axis=1)


def _product(x: Array, y: Array) -> Array:
    """The product of two keys [Dk], the same for every column: [COLUMNS]."""
    return _read(lax.broadcast_in_dim(x, (COLUMNS, len(x)), (1,)), y)


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)
