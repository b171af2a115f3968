"""Paged attention on TPUs: flash attention over pages, copied ahead from HBM.

One step of the grid is a tile of a sequence's tokens, with all its heads. It walks over blocks of
pages: while one block is being attended to, the next is copied from HBM to VMEM, a page of all KV
heads at a time. Page indices and lengths are prefetched scalars. The softmax is kept in float32.

It was compiled for v5e and v6e and interpreted on a CPU; it has never run on a TPU.

Values that no query sees may hold NaN, and pages past the end are not copied at all, so that VMEM
holds anything there. A weight of 0 would not remove it (0 x NaN is NaN): scores and values of those
slots are replaced by a select.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.products import precision_of

# Finite, so that a row that sees no slot gives no NaN. The running maximum starts far above masked
# scores, so that rounding can never give a masked score any weight.
MASKED, LOWEST_PEAK = -1e30, -1e20
TINY = 1e-30  # smallest softmax sum to divide by, for rows that see no slot
LANES = 128
ROWS = 256  # most query rows of a KV head in a tile, unless one token has more
ALL_ROWS = 2048  # the same of all KV heads
ROW_TILE = 16  # rows are padded to a multiple of it: a tile of bfloat16 has 16 rows
BLOCK = 256  # slots of a block, or one page if that is larger
BUFFER_BYTES = 4 << 20  # most VMEM for blocks: two of keys and two of values


@dataclasses.dataclass(frozen=True)
class _TilePlan:
    """Sizes of a call. A tile has ``tokens`` tokens, and for each KV head ``rows`` query rows."""

    batch: int
    num_tokens: int
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    page_size: int
    columns: int  # of the page table
    words: int  # of the ancestor mask; 0: causal
    tokens: int
    tiles: int
    rows: int
    pages: int  # of a block
    window: int | None
    first_slot: int
    scale: float  # of the scores

    @property
    def block(self) -> int:
        return self.pages * self.page_size


def _make_plan(
    q: Array, pages_of_layer: LayerPages, context: QueryContext, options: AttentionOptions
) -> _TilePlan:
    batch, num_tokens, num_heads, head_dim = q.shape
    k_pages, page_table, ancestors = pages_of_layer.k, context.page_table, context.ancestors
    _, kv_heads, page_size, _ = k_pages.shape
    group = num_heads // kv_heads
    tokens = min(num_tokens, max(min(ROWS, ALL_ROWS // kv_heads) // group, 1))
    tiles = -(-num_tokens // tokens)
    page_bytes = kv_heads * page_size * head_dim * k_pages.dtype.itemsize
    pages = min(max(BLOCK // page_size, 1), max(BUFFER_BYTES // (4 * page_bytes), 1))
    return _TilePlan(
        batch=batch,
        num_tokens=num_tokens,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        columns=page_table.shape[1],
        words=0 if ancestors is None else ancestors.shape[-1],
        tokens=tokens,
        tiles=tiles,
        rows=-(-tokens * group // ROW_TILE) * ROW_TILE,
        pages=min(pages, page_table.shape[1]),
        window=options.window,
        first_slot=options.first_slot,
        scale=head_dim**-0.5 if options.scale is None else options.scale,
    )


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def paged_attention_mosaic(
    q: Array,  # [B, T, Q, D]
    pages: LayerPages,
    context: QueryContext,
    *,
    options: AttentionOptions,
    interpret: Any = False,
) -> Array:
    """See pallas_kernels.paged_attention.paged_attention; only for what ``misfit_tpu`` accepts.

    ``interpret``: True or pltpu.InterpretParams, for tests.
    """
    plan = _make_plan(q, pages, context, options)
    page_table, context_lens, positions, ancestors, _ = context
    k_pages, v_pages, first_slot, window = pages.k, pages.v, options.first_slot, options.window
    first = jnp.full_like(context_lens, first_slot)
    if window is not None:  # it does not hide tree nodes
        in_window = jnp.min(positions, axis=1) - (window - 1)
        first = jnp.maximum(jnp.minimum(in_window, context_lens), first_slot)
    end = jnp.minimum(context.ends, plan.columns * plan.page_size)
    bounds = jnp.stack([context_lens, first, end], axis=1)  # [B, 3]
    tile = (1, 1, plan.kv_heads, plan.rows, plan.head_dim)
    facts = _row_facts(plan, positions, ancestors)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    of_tile = pl.BlockSpec(tile, lambda b, i, *_: (b, i, 0, 0, 0))
    kernel = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.batch, plan.tiles),
            in_specs=[
                of_tile,
                pl.BlockSpec((1, 1, *facts.shape[2:]), lambda b, i, *_: (b, i, 0, 0)),
                in_hbm,
                in_hbm,
            ],
            out_specs=of_tile,
            scratch_shapes=[
                *(pltpu.VMEM((2, plan.pages, *x.shape[1:]), x.dtype) for x in (k_pages, v_pages)),
                pltpu.SemaphoreType.DMA((2, 2)),
                *(pltpu.VMEM((*tile[2:4], size), jnp.float32) for size in (LANES, LANES, tile[4])),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((plan.batch, plan.tiles, *tile[2:]), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="paged_attention",
    )
    out = kernel(page_table, bounds, _as_tiles(plan, q), facts, k_pages, v_pages)
    return _as_tokens(plan, out).reshape(q.shape)


def _as_tiles(plan: _TilePlan, q: Array) -> Array:
    """[B, T, Q, D] -> [B, tiles, G, rows, D]; the rows of a token are its group's heads."""
    padding = plan.tiles * plan.tokens - plan.num_tokens
    x = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    x = x.reshape(plan.batch, plan.tiles, plan.tokens, plan.kv_heads, -1, plan.head_dim)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(plan.batch, plan.tiles, plan.kv_heads, plan.tokens * plan.group, plan.head_dim)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, plan.rows - x.shape[3]), (0, 0)))


def _as_tokens(plan: _TilePlan, tiles: Array) -> Array:
    """The reverse of _as_tiles: [B, T, G, R, D]."""
    used = tiles[:, :, :, : plan.tokens * plan.group]
    x = used.reshape(plan.batch, plan.tiles, plan.kv_heads, plan.tokens, -1, plan.head_dim)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(plan.batch, -1, *x.shape[3:])[:, : plan.num_tokens]


def _row_facts(plan: _TilePlan, positions: Array, ancestors: Array | None) -> Array:
    """What a row of a tile may see, int32 [B, tiles, rows, columns].

    The columns are the words of its mask, or the last of the queries' own slots that it sees if
    they are causal; then, with a window, the first committed slot that it sees.
    """
    if ancestors is None:
        nodes = jnp.arange(plan.num_tokens, dtype=jnp.int32)
        columns = [jnp.broadcast_to(nodes, (plan.batch, plan.num_tokens))[..., None]]
    else:
        columns = [lax.bitcast_convert_type(ancestors, jnp.int32)]
    if plan.window is not None:
        columns.append((positions - (plan.window - 1))[..., None])
    facts = jnp.concatenate(columns, axis=-1)
    padding = plan.tiles * plan.tokens - plan.num_tokens
    facts = jnp.pad(facts, ((0, 0), (0, padding), (0, 0)))
    facts = jnp.repeat(facts.reshape(plan.batch, plan.tiles, plan.tokens, -1), plan.group, axis=2)
    return jnp.pad(facts, ((0, 0), (0, 0), (0, plan.rows - facts.shape[2]), (0, 0)))


def _kernel(plan: _TilePlan, table, bounds, q, facts, k_pages, v_pages, out, k, v, copied, *state):
    peak, total, acc = state
    sequence, tile = pl.program_id(0), pl.program_id(1)
    context, first, end = (bounds[sequence, i] for i in range(3))
    if plan.words == 0:  # no row of this tile sees the tokens after it
        end = jnp.minimum(end, context + (tile + 1) * plan.tokens)
    start = first // plan.block
    stop = (end + plan.block - 1) // plan.block
    peak[...] = jnp.full_like(peak, LOWEST_PEAK)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    def each_copy(block: Array, act: Any) -> None:
        """``act`` on the copies of a block's pages that hold visible slots."""
        buffer = lax.rem(block, 2)
        for i in range(plan.pages):
            column = block * plan.pages + i

            @pl.when((column * plan.page_size < end) & ((column + 1) * plan.page_size > first))
            def _(i=i, column=column):
                page = table[sequence, column]
                for j, (pages, ring) in enumerate(((k_pages, k), (v_pages, v))):
                    act(pltpu.make_async_copy(
                        pages.at[page], ring.at[buffer, i], copied.at[j, buffer]
                    ))  # fmt: skip

    pl.when(start < stop)(lambda: each_copy(start, lambda copy: copy.start()))

    @pl.loop(start, stop)
    def _(block):
        pl.when(block + 1 < stop)(lambda: each_copy(block + 1, lambda copy: copy.start()))
        each_copy(block, lambda copy: copy.wait())
        seen = _visible(plan, facts, block * plan.block, context, end)
        slots = block * plan.block + lax.broadcasted_iota(jnp.int32, (plan.block, 1), 0)
        inside = (slots >= first) & (slots < end)
        buffer = lax.rem(block, 2)
        for head in range(plan.kv_heads):
            keys, values = (
                ring[buffer, :, head].reshape(plan.block, plan.head_dim) for ring in (k, v)
            )
            values = jnp.where(inside, values, jnp.zeros_like(values))
            _attend(plan, head, q, keys, values, seen, peak, total, acc)

    for head in range(plan.kv_heads):
        weights = jnp.maximum(total[head][:, :1], TINY)
        out[0, 0, head] = (acc[head] / weights).astype(out.dtype)


def _attend(
    plan: _TilePlan, head: int, q: Any, keys: Array, values: Array, seen: Array, *state: Any
) -> None:
    """Add one block of keys and values [block, D] to the softmax of a KV head's rows."""
    peak, total, acc = state
    product = functools.partial(
        lax.dot_general,
        precision=precision_of(keys.dtype, values.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = product(q[0, 0, head], keys, (((1,), (1,)), ((), ()))) * plan.scale
    scores = jnp.where(seen, scores, MASKED)
    before = peak[head][:, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - now)
    fade = jnp.exp(before - now)
    added = jnp.sum(weights, axis=1, keepdims=True)
    weighted = product(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
    acc[head] = acc[head] * fade + weighted
    total[head] = total[head] * fade + added
    peak[head] = jnp.broadcast_to(now, peak.shape[1:])


def _visible(plan: _TilePlan, facts: Any, first: Array, context: Array, end: Array) -> Array:
    """Which slots of the block at ``first`` each row sees: bool [rows, block]."""
    slots = first + lax.broadcasted_iota(jnp.int32, (plan.rows, plan.block), 1)
    nodes = slots - context

    def column(index: int) -> Array:
        return facts[0, 0, :, index : index + 1]  # [rows, 1]

    if plan.words == 0:
        seen = nodes <= column(0)
        if plan.window is not None:
            seen &= slots >= column(1)
    else:
        committed = nodes < 0
        if plan.window is not None:
            committed &= slots >= column(plan.words)
        chosen = jnp.zeros_like(slots)
        for word in range(plan.words):  # nodes before 0 and past the mask match no word
            chosen = jnp.where(nodes >> 5 == word, column(word), chosen)
        bit = lax.shift_right_logical(chosen, nodes & 31) & 1
        seen = committed | (bit == 1)
    seen &= slots < end
    return seen & (slots >= plan.first_slot) if plan.first_slot > 0 else seen
