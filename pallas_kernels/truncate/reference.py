"""The specification of truncation_threshold in jnp: a search over the order of float32 numbers.

If a row is split over devices, the caller passes the reductions over a whole row.

Steps that no row needs are skipped at run time. One outer lax.cond guards them all, because each
one costs about 30 us in a CUDA graph (measured on an H100). Its operand is the raw logits, so that
no intermediate array has to be written to memory for it.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax


class Reductions(Protocol):
    """Reductions over the last dimension, [..., V] -> [...]; hashable."""

    def total(self, x: Array) -> Array: ...

    def maximum(self, x: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class _WholeRows:
    def total(self, x: Array) -> Array:
        return jnp.sum(x, axis=-1)

    def maximum(self, x: Array) -> Array:
        return jnp.max(x, axis=-1)


WHOLE_ROWS = _WholeRows()


# jit: traced and lowered once for all call sites of a program.
@functools.partial(jax.jit, static_argnames="reductions")
def truncation_threshold_reference(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    reductions: Reductions = WHOLE_ROWS,
) -> Array:
    """See pallas_kernels.truncate.truncation_threshold.

    Args:
      logits: [B, N, V], or this device's shard of V.
      reductions: over a whole row, for every device that holds a shard of it.
    """
    of_count, of_weight = jnp.any(top_k > 0), jnp.any((top_p < 1) | (min_p > 0))

    def search(logits: Array) -> Array:
        least = lax.cond(of_count, by_count, keep_all, logits)
        return jnp.maximum(least, lax.cond(of_weight, by_weight, keep_more, logits, least))

    def by_count(logits: Array) -> Array:
        wanted = jnp.where(top_k > 0, top_k, jnp.iinfo(jnp.int32).max).astype(jnp.float32)
        keys, ones = ordered_keys(logits), jnp.ones_like(logits)
        return _number(_search(keys, ones, wanted[:, None], reductions))

    def by_weight(logits: Array, least: Array) -> Array:
        # Weights are relative to the likeliest token, which has weight 1.
        below = logits - reductions.maximum(logits)[..., None]
        weights = jnp.exp(below / temperature[:, None, None])
        weights = jnp.where(logits >= least[..., None], weights, 0.0)
        mass = top_p[:, None] * reductions.total(weights)
        nucleus = _number(_search(ordered_keys(logits), weights, mass, reductions))
        nucleus = jnp.where((top_p < 1)[:, None], nucleus, -jnp.inf)
        likely = jnp.where(weights >= min_p[:, None, None], logits, jnp.inf)
        lowest = -reductions.maximum(-likely)
        return jnp.maximum(nucleus, jnp.where((min_p > 0)[:, None], lowest, -jnp.inf))

    def keep_all(logits: Array) -> Array:
        return jnp.full(logits.shape[:-1], -jnp.inf, jnp.float32)

    def keep_more(logits: Array, _: Array) -> Array:
        return keep_all(logits)

    return lax.cond(of_count | of_weight, search, keep_all, logits)


def ordered_keys(x: Array) -> Array:
    """uint32 keys in the same order as the float32 values; every number has a key above 0."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _number(keys: Array) -> Array:
    """The inverse of ``ordered_keys``; -inf for key 0."""
    negative = keys >> 31 == 0
    bits = jnp.where(negative, ~keys, keys ^ jnp.uint32(1 << 31))
    return jnp.where(keys == 0, -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


@functools.partial(jax.jit, static_argnames="reductions")
def _search(keys: Array, weights: Array, wanted: Array, reductions: Reductions) -> Array:
    """The largest key such that entries at or above it weigh at least ``wanted``; 0 if none.

    keys and weights [B, N, V], wanted [B, 1] or [B, N] -> uint32 [B, N].

    On a CPU, a search bit by bit does the least work. On a GPU, 15 comparisons take as long as one,
    and a loop of 32 small kernels would cost more than the rest of a round (measured on an H100:
    0.5 ms).
    """
    wanted = jnp.broadcast_to(wanted, keys.shape[:-1])
    return lax.platform_dependent(
        keys,
        weights,
        wanted,
        cpu=functools.partial(search_digits, digit_bits=1, reductions=reductions),
        default=functools.partial(search_digits, digit_bits=4, reductions=reductions),
    )


def search_digits(
    keys: Array,
    weights: Array,
    wanted: Array,
    *,
    digit_bits: int,
    reductions: Reductions = WHOLE_ROWS,
) -> Array:
    """_search by digits of the key, the highest first: wanted [B, N] -> uint32 [B, N]."""
    digits = jnp.arange(1, 1 << digit_bits, dtype=jnp.uint32)

    def find_digit(step: Array | int, found: Array) -> Array:
        shift = jnp.uint32(32 - digit_bits) - jnp.uint32(digit_bits) * jnp.uint32(step)
        candidates = found[..., None] | digits << shift  # [B, N, digits]
        above = jnp.where(keys[:, :, None] >= candidates[..., None], weights[:, :, None], 0.0)
        enough = reductions.total(above) >= wanted[..., None]
        # The weight above a candidate falls as the candidate grows, so the digit is the number of
        # candidates with enough weight above them.
        return found | jnp.sum(enough, axis=-1, dtype=jnp.uint32) << shift

    # Unrolled on a GPU, where a loop inside a round would break its CUDA graph.
    none = jnp.zeros(keys.shape[:-1], jnp.uint32)
    return jax.lax.fori_loop(0, 32 // digit_bits, find_digit, none, unroll=digit_bits > 1)
