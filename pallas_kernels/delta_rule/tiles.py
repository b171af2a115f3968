"""Tiles of states of a gated delta rule on Hopper GPUs: 64 columns of a value head in the registers
of a warpgroup."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_rule.tokens import Tokens

COLUMNS = 64  # of a value head, that a warpgroup holds
TILE = plgpu.Layout.WGMMA  # [COLUMNS, Dk]: four threads share a column of the state
BY_COLUMN, BY_KEY = TILE.reduce(1), TILE.reduce(0)
AT_ONCE = 16  # tokens of a window whose loads are on their way: five registers each


def copy_window(window: Tokens, at: tuple[Any, Any], part: Any, copy: Tokens) -> None:
    """Copy a window's tokens to shared memory, as far as they concern a part (see ``load_token``).

    Loads of AT_ONCE tokens are on their way at the same time: a token takes a latency of the memory
    otherwise, which is longer than what is done with it.

    Args:
      at: the row, and how many tokens it has; of those after them the last is copied again.
      copy: k [C, Dk], v [C, COLUMNS], g [C] and beta [C].
    """
    (row, count), (group, value, columns) = at, part
    capacity, k_dim = copy.k.shape
    of_key = plgpu.Layout.WG_STRIDED((k_dim,), vec_size=1)

    def token(index: int) -> Tokens:
        place = jnp.minimum(index, jnp.maximum(count - 1, 0))
        return Tokens(
            load(window.k.at[row, place, group], of_key),
            load(window.v.at[row, place, group, value, columns], BY_COLUMN),
            window.g[row, place, group, value],
            window.beta[row, place, group, value],
        )

    for begin in range(0, capacity, AT_ONCE):
        places = range(begin, min(begin + AT_ONCE, capacity))
        for place, found in zip(places, list(map(token, places)), strict=True):
            for ref, entries in zip(copy, found, strict=True):
                ref[place] = entries
    plgpu.commit_smem()


def applied(tile: Array, token: Tokens) -> Array:
    """The state [COLUMNS, Dk] after a token."""
    tile = tile * jnp.exp(token.g)
    written = token.beta * (token.v - read_by(tile, token.k))
    column = lax.broadcast_in_dim(written, tile.shape, (0,))
    return tile + column * lax.broadcast_in_dim(token.k, tile.shape, (1,))


def read_by(tile: Array, x: Array) -> Array:
    """What x [Dk] reads from a state [COLUMNS, Dk]."""
    return jnp.sum(tile * lax.broadcast_in_dim(x, tile.shape, (1,)), axis=1)


def product(x: Array, y: Array) -> Array:
    """The product of two keys [Dk], the same for every column: [COLUMNS]."""
    return read_by(lax.broadcast_in_dim(x, (COLUMNS, len(x)), (1,)), y)


def load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def part_of(part: Any, values: int) -> tuple[Any, Any]:
    """The value head of a warpgroup, and its columns."""
    return part % values, pl.ds(part // values * COLUMNS, COLUMNS)


def load_token(refs: Tokens, row: Any, place: Any, part: tuple[Any, Any, Any]) -> Tokens:
    """A token's inputs, as far as they concern a part: its group, value head and columns."""
    group, value, columns = part
    return Tokens(
        load(refs.k.at[row, place, group], BY_KEY),
        load(refs.v.at[row, place, group, value, columns], BY_COLUMN),
        refs.g[row, place, group, value],
        refs.beta[row, place, group, value],
    )


def two_halves(x: Array, interpret: bool) -> tuple[Array, Array]:
    """Two numbers for each of x, in bfloat16, whose sum it nearly is; interpreted in float32."""
    if interpret:  # XLA may leave out a rounding to bfloat16
        high = lax.reduce_precision(x, 8, 7)
        return high, lax.reduce_precision(x - high, 8, 7)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
