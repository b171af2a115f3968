"""The gated delta rule of prompts on Hopper GPUs, by blocks of tokens, whose products are those of
tensor cores.

A block is 16 tokens, from a multiple of 16 on. With S the state before it, k, q, v, g and beta of
its tokens, G the sum of g up to a token (Yang et al., arXiv 2412.06464, the UT transform):

    W = P beta (v - e^G S k),  P = (I + L)^-1,  L_ij = beta_i e^(G_i - G_j) k_i . k_j  for j < i
    o = e^G S q + M W,  M_ij = e^(G_i - G_j) q_i . k_j  for j <= i
    S <- e^G_15 S + sum_j e^(G_15 - G_j) w_j k_j^T

P and M do not depend on the state: systems.py makes them for all blocks at once. A warpgroup has 64
columns of a value head's state in registers and takes block after block. Every operand is the sum
of two numbers in bfloat16, of whose four products the smallest is left out, so that 16 bits are
right. Blocks begin at multiples of 16 tokens of a row: how calls cut it changes no bit.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.delta_rule.systems import BY_TOKEN, DECAYS, ROWS, Blocks, systems_mosaic
from pallas_kernels.delta_rule.tiles import COLUMNS, TILE, load, part_of, two_halves
from pallas_kernels.delta_rule.tokens import (
    BLOCK,
    RowStates,
    Tokens,
    select_tokens,
    take_tokens,
)
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.packed_product.blocks import write_plain
from pallas_kernels.shared_memory import swizzled

STAGES = 3  # blocks in shared memory
COPIES = 4  # of a block


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
    """See pallas_kernels.delta_rule.delta_run; only for arguments that ``run_misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    _, groups, values, _, _ = states.s.shape
    (batch, size), capacity = q.shape[:2], states.window.k.shape[1]
    held, total = states.held, jnp.where(counts > 0, states.held + counts, 0)
    sizes = Blocks(batch, groups, values, -(-(capacity - 1 + size) // BLOCK))
    q_first, first = _first(states, counts, q, tokens)
    decays = _decays(sizes, states, first, tokens, total)
    systems = systems_mosaic(
        sizes, ((first.k, q_first), (tokens.k, q)), decays, (held, total), interpret=interpret
    )
    s_ref = jax.new_ref(states.s)
    kernel = _make_kernel(sizes, capacity, states.s.shape, interpret)
    out = kernel(*systems, decays, first.v, tokens.v, states.rows, held, total, s_ref)
    place = held[:, None] + jnp.arange(size)
    out = select_tokens(jnp.arange(size) < counts[:, None], take_tokens(out, place), 0)
    return out, jax.freeze(s_ref)


def _make_kernel(sizes: Blocks, capacity: int, states: tuple[int, ...], interpret: Any) -> Any:
    rows, groups, values, v_dim, k_dim = states

    @fixed_name(interpret)
    def delta_run_kernel(
        keys, systems, decays, v_first, v_new, rows_ref, held_ref, total_ref, s_ref, out_ref, *refs
    ):
        *ring, results, full = refs
        sequence, group = kernel_axes.index("sequence"), kernel_axes.index("group")
        value, columns = part_of(kernel_axes.index("part"), values)
        part = _Part(
            sizes=sizes,
            capacity=capacity,
            at=(sequence, group, value, columns),
            held=held_ref[sequence],
            total=total_ref[sequence],
            sources=((keys, systems, decays), (v_first, v_new)),
            ring=ring,
            full=full,
            interpret=interpret is not None,
        )
        state = s_ref.at[jnp.minimum(rows_ref[sequence], rows - 1), group, value, columns]
        part.run(state, out_ref, results)

    def swizzled_rows(width: int) -> Any:
        transforms = swizzled(BLOCK, 16)  # lines of as many entries as a product sums up
        return plgpu.SMEM((STAGES, ROWS, width), jnp.bfloat16, transforms=transforms)

    out_shape = sizes.sequences, sizes.blocks * BLOCK, groups, values, v_dim
    return plgpu.kernel(
        delta_run_kernel,
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        scratch_types=[
            swizzled_rows(k_dim),
            swizzled_rows(BLOCK),
            plgpu.SMEM((STAGES, DECAYS, BLOCK), jnp.float32),
            plgpu.SMEM((STAGES, BLOCK, COLUMNS), jnp.float32),
            plgpu.SMEM((BLOCK, COLUMNS), jnp.float32),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=STAGES),
        ],
        grid=(values * v_dim // COLUMNS, groups, sizes.sequences),
        grid_names=kernel_axes.names("part", "group", "sequence"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # there are barriers where threads need them: few
        ),
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a warpgroup reads of a row.

    Attributes:
      capacity: tokens of a window.
      at: sequence, group, value head and columns.
      held: tokens in the window.
      total: tokens from the window's begin on.
      sources: keys, systems and decays of all blocks; values of the first ``capacity`` tokens, and
        of the pass's.
      ring: STAGES of each in shared memory, with a barrier for each stage in ``full``.
    """

    sizes: Blocks
    capacity: int
    at: tuple[Any, Any, Any, Any]
    held: Array
    total: Array
    sources: tuple[tuple[Any, Any, Any], tuple[Any, Any]]
    ring: list[Any]
    full: Any
    interpret: bool

    @property
    def count(self) -> Array:
        """Blocks with tokens."""
        return (self.total + BLOCK - 1) // BLOCK

    def run(self, state: Any, out: Any, results: Any) -> None:
        """Read all blocks, and store the state at the last multiple of the window's size."""
        count, kept = self.count, self.total // self.capacity * (self.capacity // BLOCK)
        sequence, *heads = self.at

        def read(block: Any, tile: Array) -> Array:
            stage = lax.rem(block, STAGES)
            plgpu.barrier_wait(self.full.at[stage])
            operands = [ref.at[stage] for ref in self.ring]
            left = self.total - block * BLOCK
            outputs, tile = _applied(tile, left, *operands, interpret=self.interpret)
            _store(outputs, out.at[sequence, pl.ds(block * BLOCK, BLOCK), *heads], results)

            @pl.when(block + STAGES < count)
            def _():
                self.copy(block + STAGES)

            return tile

        for first in range(STAGES):
            pl.when(first < count)(functools.partial(self.copy, jnp.int32(first)))
        tile = lax.fori_loop(0, kept, read, load(state, TILE))

        @pl.when(kept > 0)
        def _keep():
            state[...] = tile

        lax.fori_loop(kept, count, read, tile)
        plgpu.wait_smem_to_gmem(0)

    def copy(self, block: Any) -> None:
        """Copy a block into its stage of the ring."""
        arrays, (v_first, v_new) = self.sources
        sequence, group, value, columns = self.at
        stage, begin = lax.rem(block, STAGES), block * BLOCK
        *ring, v = (ref.at[stage] for ref in self.ring)
        full = self.full.at[stage]

        def copy_values(source: Any, start: Any) -> None:
            tokens = source.at[sequence, pl.ds(start, BLOCK), group, value, columns]
            plgpu.copy_gmem_to_smem(tokens, v, full)

        is_first = begin < self.capacity
        pl.when(is_first)(functools.partial(copy_values, v_first, begin))
        pl.when(~is_first)(functools.partial(copy_values, v_new, begin - self.held))
        of_key = self.sizes.of_key_head(sequence, group, block)
        of_value = self.sizes.of_value_head(sequence, group, value, block)
        places = (of_key, ROWS), (of_value, ROWS), (of_value, DECAYS)
        for array, (index, rows), copied in zip(arrays, places, ring, strict=True):
            plgpu.copy_gmem_to_smem(array.at[pl.ds(index * rows, rows)], copied, full)


def _applied(
    tile: Array, count: Array, keys: Any, systems: Any, decays: Any, v: Any, *, interpret: bool
) -> tuple[Array, Array]:
    """Outputs [COLUMNS, BLOCK] of a block's tokens, and the state [COLUMNS, Dk] after them.

    Args:
      tile: the state before them.
      count: tokens that are there.
      keys: [ROWS, Dk], keys and queries, and what these lack in bfloat16.
      systems: [ROWS, BLOCK], P and M, transposed, and what these lack.
      decays: [DECAYS, BLOCK], as systems.py has them.
      v: [BLOCK, COLUMNS].
    """
    products = functools.partial(_products, interpret=interpret)

    def by_token(index: int) -> Array:
        entries = plgpu.load(decays.at[index], layout=BY_TOKEN, optimized=False)
        return lax.broadcast_in_dim(entries, (COLUMNS, BLOCK), (1,))

    def two(ref: Any, first: int, count: int = BLOCK) -> list[Any]:
        """So many rows from ``first`` on, and what they lack."""
        return [ref.at[pl.ds(2 * BLOCK * half + first, count)] for half in range(2)]

    readers = [half.transpose((1, 0)) for half in two(keys, 0, 2 * BLOCK)]
    [reads] = products((two_halves(tile, interpret), readers))
    at_keys, at_queries = reads[:, :BLOCK], reads[:, BLOCK:]
    since = by_token(0)
    values = plgpu.load(v.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    values = plgpu.layout_cast(values, TILE)
    token = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=TILE)
    values = jnp.where(token < count, values, 0)
    missing = by_token(2) * (values - since * at_keys)
    [written] = products((two_halves(missing, interpret), two(systems, 0)))
    of_written, added = products(
        (two_halves(written, interpret), two(systems, BLOCK)),
        (two_halves(written * by_token(1), interpret), two(keys, 0)),
    )
    return since * at_queries + of_written, tile * decays[0, BLOCK - 1] + added


def _products(*terms: tuple[tuple[Array, Array], list[Any]], interpret: bool) -> list[Array]:
    """x @ y of each term, of two numbers each: x [COLUMNS, n] in registers, y [n, m] in shared
    memory."""
    pairs = [
        [(high, y_high), (high, y_low), (low, y_high)] for (high, low), (y_high, y_low) in terms
    ]
    if interpret:  # it knows no operands in registers
        exact = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
        wide = ([(x, y[...].astype(jnp.float32)) for x, y in some] for some in pairs)
        return [functools.reduce(jnp.add, (exact(x, y) for x, y in some)) for some in wide]

    def multiply(*sums: Any) -> list[Array]:
        for acc, some in zip(sums, pairs, strict=True):
            for x, y in some:
                plgpu.wgmma(acc, x, y)
        return [acc[...] for acc in sums]

    shapes = ((COLUMNS, some[0][1].shape[1]) for some in pairs)
    return pl.run_scoped(
        multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes)
    )


def _store(outputs: Array, place: Any, results: Any) -> None:
    """Store outputs [COLUMNS, BLOCK] as rows of ``place`` [BLOCK, COLUMNS], through ``results``.
    The copy is under way yet."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    transposed = plgpu.layout_cast(outputs, plgpu.Layout.WGMMA_TRANSPOSED)
    write_plain(results.transpose((1, 0)), transposed)
    plgpu.commit_smem()  # all threads have read the block, too: its stage is free
    plgpu.copy_smem_to_gmem(results, place)


def _first(states: RowStates, counts: Array, q: Array, tokens: Tokens) -> tuple[Array, Tokens]:
    """Queries and tokens [B, C, ...] of the first C from the window's begin on; zeros where there
    is none."""
    _, window, rows, held = states
    (_, size), capacity = q.shape[:2], window.k.shape[1]
    place = jnp.broadcast_to(jnp.arange(capacity), (len(q), capacity))
    is_old, of_new = place < held[:, None], jnp.clip(place - held[:, None], 0, size - 1)
    is_new = ~is_old & (place < (held + counts)[:, None])

    def joined(old: Array, new: Array) -> Array:
        return select_tokens(is_old, old[rows], select_tokens(is_new, take_tokens(new, of_new), 0))

    return select_tokens(is_new, take_tokens(q, of_new), 0), Tokens(*map(joined, window, tokens))


def _decays(sizes: Blocks, states: RowStates, first: Tokens, tokens: Tokens, total: Array) -> Array:
    """The decays and strengths of blocks, as systems.py has them: [B * G * r * blocks * DECAYS,
    BLOCK]."""
    held, capacity, size = states.held, first.k.shape[1], tokens.k.shape[1]
    place = jnp.arange(sizes.blocks * BLOCK)
    place = jnp.broadcast_to(place, (len(held), len(place)))

    def by_block(of_first: Array, of_new: Array) -> Array:
        """[B, G, r, blocks, BLOCK]"""
        old = take_tokens(of_first, jnp.minimum(place, capacity - 1))
        new = take_tokens(of_new, jnp.clip(place - held[:, None], 0, size - 1))
        found = select_tokens(place < total[:, None], select_tokens(place < capacity, old, new), 0)
        return found.reshape(len(held), -1, BLOCK, *found.shape[2:]).transpose(0, 3, 4, 1, 2)

    log_decay = jnp.cumsum(by_block(first.g, tokens.g), axis=-1)
    until = jnp.exp(log_decay[..., -1:] - log_decay)
    beta = by_block(first.beta, tokens.beta)
    return jnp.stack([jnp.exp(log_decay), until, beta, log_decay], -2).reshape(-1, BLOCK)
