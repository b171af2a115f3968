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
