"""States of a gated delta rule, and what tokens do to them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

BLOCK = 16  # consecutive tokens that the kernel of prompts takes at once


class Tokens(NamedTuple):
    """B rows of T tokens with G key heads and r value heads each, float32."""

    k: Array  # [B, T, G, Dk] keys
    v: Array  # [B, T, G, r, Dv] values
    g: Array  # [B, T, G, r] logs of the decays
    beta: Array  # [B, T, G, r] strengths


class RowStates(NamedTuple):
    """The states of B of R rows: each after some tokens, of which the last are in a window.

    Attributes:
      s: float32 [R, G, r, Dv, Dk], states before the window.
      window: [R, C, ...], tokens after it.
      rows: int32 [B], each sequence's entry of s and window; out of range only where a sequence
        has no tokens.
      held: int32 [B], tokens in the window; the entries after them are not read.
    """

    s: Array
    window: Tokens
    rows: Array
    held: Array


class LayerRows(NamedTuple):
    """What a layer keeps of R rows, and the nodes of trees that may be appended to it.

    Attributes:
      s: as of RowStates.
      window: as of RowStates.
      channels: [R, K - 1, G, c], the last inputs of the convolution.
      nodes: [B, N, ...].
      node_channels: [B, N, G, c or more], those of the nodes; what is after them is not read.
    """

    s: Array
    window: Tokens
    channels: Array
    nodes: Tokens
    node_channels: Array


def take_tokens(x: Array, index: Array) -> Array:
    """x [B, T, ...] at index [B, n]: [B, n, ...]"""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def select_tokens(valid: Array, x: Array, other: Array | float) -> Array:
    """x [B, T, ...] where valid [B, T], else ``other``."""
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, other)
