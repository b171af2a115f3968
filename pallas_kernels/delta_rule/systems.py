"""What tokens of a block do to each other, for the kernel of blocks.py: a warpgroup for each block
and key head, all at once."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.delta_rule.tiles import COLUMNS, TILE, two_halves
from pallas_kernels.delta_rule.tokens import BLOCK
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.packed_product.blocks import write_plain
from pallas_kernels.shared_memory import swizzled

ROWS = 4 * BLOCK  # of a block: keys, queries, and what these lack in bfloat16; likewise of P and M
DECAYS = 4  # since the block's begin, until its end, the strengths, the logs since its begin
BY_TOKEN = TILE.reduce(0)  # one value for each token of a tile [ROWS, BLOCK]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How many blocks there are, and where arrays have a head's, one after the other."""

    sequences: int
    groups: int
    values: int  # of a group
    blocks: int  # of a sequence

    def of_key_head(self, sequence: Any, group: Any, block: Any) -> Any:
        return (sequence * self.groups + group) * self.blocks + block

    def of_value_head(self, sequence: Any, group: Any, value: Any, block: Any) -> Any:
        return ((sequence * self.groups + group) * self.values + value) * self.blocks + block


def systems_mosaic(
    sizes: Blocks,
    keys: tuple[tuple[Array, Array], tuple[Array, Array]],
    decays: Array,  # [B * G * r * blocks * DECAYS, BLOCK]
    lengths: tuple[Array, Array],  # [B]
    *,
    interpret: Any,
) -> tuple[Array, Array]:
    """Keys and queries of blocks, and their systems: see blocks.py.

    Args:
      keys: keys and queries [B, C, G, Dk] of the first C tokens since the window's begin, and [B,
        T, G, Dk] of all tokens of the pass.
      decays: of blocks, their rows as DECAYS says.
      lengths: tokens before those of the pass, since the window's begin, and all together. What is
        after them is not used, whatever it is.

    Returns bfloat16 [B * G * blocks * ROWS, Dk], [B * G * r * blocks * ROWS, BLOCK]; anything for
    blocks without tokens.
    """
    k_dim = keys[0][0].shape[-1]

    @fixed_name(interpret)
    def delta_systems_kernel(
        k_first, q_first, k_new, q_new, decays_in, held_ref, total_ref, keys_out, systems_out, *refs
    ):
        sequence = kernel_axes.index("sequence")
        block = _Block(
            sizes=sizes,
            at=(sequence, kernel_axes.index("group"), kernel_axes.index("block")),
            held=held_ref[sequence],
            left=total_ref[sequence] - kernel_axes.index("block") * BLOCK,
            sources=((k_first, q_first), (k_new, q_new), decays_in),
            interpret=interpret is not None,
        )
        pl.when(block.left > 0)(functools.partial(block.run, keys_out, systems_out, *refs))

    heads = sizes.sequences * sizes.groups * sizes.blocks
    kernel = plgpu.kernel(
        delta_systems_kernel,
        out_type=(
            jax.ShapeDtypeStruct((heads * ROWS, k_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((heads * sizes.values * ROWS, BLOCK), jnp.bfloat16),
        ),
        scratch_types=[
            plgpu.SMEM((ROWS, k_dim), jnp.float32),
            plgpu.SMEM((ROWS, k_dim), jnp.bfloat16, transforms=swizzled(BLOCK, 16)),
            plgpu.SMEM((ROWS, ROWS), jnp.float32),
            plgpu.SMEM((sizes.values, DECAYS, BLOCK), jnp.float32),
            plgpu.SMEM((ROWS, BLOCK), jnp.float32),
            plgpu.SMEM((ROWS, BLOCK), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=4 + sizes.values),
        ],
        grid=(sizes.blocks, sizes.groups, sizes.sequences),
        grid_names=kernel_axes.names("block", "group", "sequence"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # there are barriers where threads need them: few
        ),
        interpret=interpret,
    )
    (first, new), (held, total) = keys, lengths
    return kernel(*first, *new, decays, held, total)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A warpgroup's block.

    Attributes:
      at: sequence, group and block.
      held: tokens before those of the pass, since the window's begin.
      left: tokens from the block's begin on.
      sources: keys and queries of the first tokens, and of the pass's; decays.
    """

    sizes: Blocks
    at: tuple[Any, Any, Any]
    held: Array
    left: Array
    sources: tuple[tuple[Any, Any], tuple[Any, Any], Any]
    interpret: bool

    def run(self, keys_out: Any, systems_out: Any, wide: Any, keys: Any, *refs: Any) -> None:
        """Write the block's keys and queries, and the systems of its value heads."""
        pairs, decays, inverses, systems, full = refs
        sequence, group, block = self.at
        self._copy(wide, decays, full)
        _write_keys(wide, keys, self.left, self.interpret)
        write_plain(pairs, _gram(keys, self.interpret))
        plgpu.commit_smem()
        of_key = pl.ds(self.sizes.of_key_head(*self.at) * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(keys, keys_out.at[of_key])
        for value in range(self.sizes.values):
            _write_systems(pairs, decays.at[value], inverses, systems, self.interpret)
            plgpu.commit_smem()
            index = self.sizes.of_value_head(sequence, group, value, block)
            plgpu.copy_smem_to_gmem(systems, systems_out.at[pl.ds(index * ROWS, ROWS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _copy(self, wide: Any, decays: Any, full: Any) -> None:
        """Copy keys and queries, twice: the second time to find what bfloat16 lacks."""
        first, new, decays_in = self.sources
        sequence, group, block = self.at
        begin, capacity = block * BLOCK, first[0].shape[1]

        def copy(sources: tuple[Any, Any], start: Any) -> None:
            for half in range(2):
                for index, source in enumerate(sources):
                    rows = pl.ds((2 * half + index) * BLOCK, BLOCK)
                    tokens = source.at[sequence, pl.ds(start, BLOCK), group]
                    plgpu.copy_gmem_to_smem(tokens, wide.at[rows], full)

        pl.when(begin < capacity)(functools.partial(copy, first, begin))
        pl.when(begin >= capacity)(functools.partial(copy, new, begin - self.held))
        for value in range(self.sizes.values):
            index = self.sizes.of_value_head(sequence, group, value, block)
            rows = decays_in.at[pl.ds(index * DECAYS, DECAYS)]
            plgpu.copy_gmem_to_smem(rows, decays.at[value], full)
        plgpu.barrier_wait(full)


def _write_keys(wide: Any, keys: Any, count: Array, interpret: bool) -> None:
    """The rows of a block in bfloat16, and what they lack; zeros from token ``count`` on."""
    x = plgpu.load(wide, layout=TILE, optimized=False)
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=TILE)
    x = jnp.where(lax.rem(row, BLOCK) < count, x, 0)
    high, low = (half.astype(jnp.float32) for half in two_halves(x, interpret))
    keys[...] = jnp.where(row < 2 * BLOCK, high, low).astype(jnp.bfloat16)
    plgpu.commit_smem()


def _gram(keys: Any, interpret: bool) -> Array:
    """Products of all rows [ROWS, Dk] of a block with each other: float32 [ROWS, ROWS]."""
    if interpret:
        x = keys[...].astype(jnp.float32)
        return jnp.dot(x, x.T, precision=lax.Precision.HIGHEST)

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, keys, keys.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, ROWS), jnp.float32))


def _write_systems(pairs: Any, decays: Any, inverses: Any, systems: Any, interpret: bool) -> None:
    """P and M of a value head, transposed, and what they lack: see blocks.py.

    Args:
      pairs: [ROWS, ROWS] products of the block's rows.
      decays: [DECAYS, BLOCK].
      inverses: [ROWS, BLOCK], which is overwritten.
    """
    log_decay = plgpu.load(decays.at[3], layout=BY_TOKEN, optimized=False)
    column = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=BY_TOKEN)
    shape = (COLUMNS, BLOCK)
    tile_row, tile_column = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) for axis in range(2)
    )

    def products(row: Any, first: int) -> Array:
        """Products of key ``row`` with the rows from ``first`` on: [BLOCK]. Of the four products of
        two numbers each the smallest is left out."""
        terms = (row, first), (row, first + 2 * BLOCK), (row + 2 * BLOCK, first)
        loads = (
            plgpu.load(pairs.at[at, pl.ds(of, BLOCK)], layout=BY_TOKEN, optimized=False)
            for at, of in terms
        )
        return functools.reduce(jnp.add, loads)

    def write(row: Any, entries: Array) -> None:
        for place, half in zip((row, 2 * BLOCK + row), two_halves(entries, interpret), strict=True):
            systems[place] = half.astype(jnp.bfloat16)

    def step(token: Any, inverse: Array) -> Array:
        """Row ``token`` of P, by the rows before it, and of M's transpose."""
        of_keys, of_queries = products(token, 0), products(token, BLOCK)
        decay = jnp.exp(-jnp.abs(log_decay - decays[3, token]))  # from the earlier to the later
        below = jnp.where(column < token, of_keys * decay * decays[2, token], 0)
        known = jnp.sum(inverse * lax.broadcast_in_dim(below, shape, (1,)), axis=1)
        here = jnp.where(tile_row == token, 1.0, 0.0) - lax.broadcast_in_dim(known, shape, (0,))
        write(BLOCK + token, jnp.where(column >= token, of_queries * decay, 0))
        return jnp.where(tile_column == token, here, inverse)

    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)
    write_plain(inverses, lax.fori_loop(0, BLOCK, step, nothing))
    plgpu.commit_smem()

    @pl.loop(0, BLOCK)
    def _round(row):
        write(row, plgpu.load(inverses.at[row], layout=BY_TOKEN, optimized=False))
