"""Rows of queries in the registers of a warpgroup: what they see, their products, their softmax.

For the kernels of paged and of latent attention. ``plan`` and ``work`` are a kernel's own.
"""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.paged_attention.tuning import ROWS

# Finite, so that a row that sees no slot gives no NaN. The running maximum starts far above masked
# scores, so that rounding can never give a masked score any weight.
MASKED, LOWEST_PEAK = -1e30, -1e20
TINY = 1e-30  # smallest softmax sum to divide by, for rows that see no slot
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def words_of_rows(ancestors: Array | None, token_of_row: np.ndarray, batch: int) -> Array:
    """The words of the rows' masks [B, tiles, words, ROWS]; [B, words] if a token is the only one.

    Args:
      ancestors: [B, T, words], or None for causal queries: then the last node that a row sees.
      token_of_row: [tiles, ROWS]
    """
    if ancestors is None:
        last_node = token_of_row.astype(np.uint32)[:, None]
        # A constant: otherwise every layer of a draft head would need a launch to compute it.
        return jnp.asarray(np.broadcast_to(last_node, (batch, len(token_of_row), 1, ROWS)))
    if ancestors.shape[1] == 1:
        return ancestors[:, 0]
    return ancestors[:, token_of_row].transpose(0, 1, 3, 2)


def load_words(plan: Any, work: Any, row_words: Any, tile: Array) -> list[Array]:
    """The words of each row's mask: [ROWS] each, or scalars if all rows have the same mask.

    For causal queries the index of the last node that a row sees, int32. Either way, nodes from
    ``end`` on are excluded.
    """
    nodes = work.end - work.context
    if len(row_words.shape) == 2:
        words = [row_words[work.sequence, word] for word in range(plan.words)]
    else:
        words = [row_load(row_words.at[work.sequence, tile, word]) for word in range(plan.words)]
    if plan.causal:
        return [jnp.minimum(words[0].astype(jnp.int32), nodes - 1)]
    return [word & _first_bits(nodes - 32 * index) for index, word in enumerate(words)]


def _first_bits(number: Array) -> Array:
    """A word with its lowest ``number`` bits set; ``number`` is clipped to 0 .. 32."""
    some = (jnp.uint32(1) << jnp.clip(number, 0, 31).astype(jnp.uint32)) - 1
    return jnp.where(number < 32, some, jnp.uint32(0xFFFFFFFF))


def visible(
    plan: Any, work: Any, slot: Array, words: list[Array], seen_from: Array | None = None
) -> Array:
    """Which of the slots [ROWS, n], counted in the sequence, each row sees: bool [ROWS, n]."""
    width = slot.shape[1]
    node = slot - work.context
    if plan.causal:
        seen = node <= by_row(words[0], width)
        if seen_from is not None:
            seen &= slot >= by_row(seen_from, width)
    else:  # nodes before 0 and past the mask match no word, so their bit is 0
        committed = slot < work.committed
        if seen_from is not None:
            committed &= slot >= by_row(seen_from, width)
        chosen = jnp.zeros((), jnp.uint32)
        for index, word in enumerate(words):
            word = by_row(word, width) if word.ndim else word
            chosen = jnp.where(node >> 5 == index, word, chosen)
        bit = (chosen >> (node & 31).astype(jnp.uint32)) & 1
        seen = committed | (bit == 1)
    return seen & (slot >= plan.first_slot) if plan.first_slot > 0 else seen


def softmax_step(scores: Array, scale: Any, peak: Array) -> tuple[Array, Array, Array]:
    """One step of an online softmax, in powers of 2.

    Args:
      scores: [ROWS, n], not yet multiplied by ``scale``.
      peak: [ROWS], the largest scaled score of the steps before.

    Returns weights [ROWS, n], by what earlier weights decay [ROWS], and the new peak. The caller
    adds up the weights, where that delays its other work least.
    """
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * scale)
    decay = jnp.exp2(peak - new_peak)
    return jnp.exp2(scores * scale - by_row(new_peak, scores.shape[1])), decay, new_peak


def capped(scores: Array, scale: Any, softcap: float) -> Array:
    """``softcap * tanh(scores * scale / softcap)``, by two approximate functions.

    The GPU's tanh has an error of 2^-11; times a cap of 50 that would be more than bfloat16's. Here
    it is one of float32: tanh(x) = 1 - 2 / (1 + exp(2 x)), and 1 / y is the square of rsqrt(y).
    """
    root = lax.rsqrt(1 + jnp.exp2(scores * (scale * (2 * math.log2(math.e) / softcap))))
    return softcap - (2 * softcap) * (root * root)


def product(x: Any, y: Any, acc: Array | None = None, *, interpret: bool) -> Array:
    """x @ y plus acc, waited for: x [ROWS, n] an array or a ref, y [n, m] in shared memory."""
    if interpret:  # the interpreter supports neither run_state nor operands in registers
        result = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)
        return result if acc is None else acc + result

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, x, y)
        return acc_ref[...]

    def accumulate(acc_ref):
        plgpu.wgmma(acc_ref, x, y)

    if acc is None:
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, y.shape[1]), jnp.float32))
    summed: Any = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(acc))
    return summed


def filled(shape: tuple[int, ...], value: float) -> Array:
    """float32 [ROWS] or [ROWS, n], laid out as what products give."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else ROW_LAYOUT
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def slots_from(first: Array, width: int) -> Array:
    """The numbers from ``first`` on, for each row: int32 [ROWS, width]."""
    return first + plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 1, layout=plgpu.Layout.WGMMA)


def by_row(values: Array, width: int) -> Array:
    """[ROWS] -> [ROWS, width]"""
    return lax.broadcast_in_dim(values, (ROWS, width), [0])


def row_load(ref: Any) -> Array:
    """Load one value per row: [ROWS]."""
    return plgpu.load(ref, layout=ROW_LAYOUT, optimized=False)


def write(ref: Any, value: Array) -> None:
    """Store to plain shared memory. jax 0.12 has to be told that bank conflicts are allowed."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
