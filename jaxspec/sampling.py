"""From logits to tokens.

The target's token at absolute position ``t`` is ``argmax(processed_logits + gumbel(seed, t))``,
an exact sample of softmax(processed_logits) by the Gumbel-max trick. The noise is a function of
(seed, position, token), so the token does not depend on how many are scored at once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jaxspec import collectives
from jaxspec.noise import Stream, gumbel
from jaxspec.pytree import Pytree, array, pytree
from jaxspec.sharding import WHOLE, Layout


@pytree
class Sampling(Pytree):
    """Sampling parameters of each row, [B] each. All of them are data: no value compiles anew."""

    temperature: Array = array("batch")  # float32; 0 takes the likeliest token
    top_k: Array = array("batch")  # int32; 0 keeps all
    top_p: Array = array("batch")  # float32; 1 keeps all
    min_p: Array = array("batch")  # float32; 0 keeps all
    seeds: Array = array("batch")  # uint32

    @property
    def drawn(self) -> Array:
        """Rows that sample: bool [B]."""
        return self.temperature > 0


def make_sampling(
    batch: int,
    *,
    temperature: ArrayLike = 0.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    seeds: ArrayLike = 0,
) -> Sampling:
    """Sampling of ``batch`` rows from scalars or [B] arrays; all but shapes may be traced.

    A scalar seed gives row ``i`` the seed ``seeds + i``, so equal prompts give different samples;
    give an array of equal seeds for equal ones.

    Raises ValueError for a value out of range, where values are known.
    """
    own = np.arange(batch, dtype=np.uint32) if np.ndim(seeds) == 0 else np.uint32(0)
    sampling = Sampling(
        temperature=_rows(temperature, batch, jnp.float32),
        top_k=_rows(top_k, batch, jnp.int32),
        top_p=_rows(top_p, batch, jnp.float32),
        min_p=_rows(min_p, batch, jnp.float32),
        seeds=_rows(seeds, batch, jnp.uint32) + own,
    )
    _check_range("temperature", temperature, lambda x: x >= 0, "at least 0")
    _check_range("top_k", top_k, lambda x: x >= 0, "at least 0 (0 keeps all tokens)")
    _check_range("top_p", top_p, lambda x: (x > 0) & (x <= 1), "in (0, 1]")
    _check_range("min_p", min_p, lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
    return sampling


def _rows(value: ArrayLike, batch: int, dtype: DTypeLike) -> Array:
    if not isinstance(value, Array):  # jax would take a large Python int for an int32
        value = np.asarray(value).astype(dtype)
    return jnp.broadcast_to(jnp.asarray(value).astype(dtype), (batch,))


def _check_range(name: str, value: ArrayLike, is_ok: Callable, rule: str) -> None:
    if isinstance(value, Tracer):
        return
    values = np.atleast_1d(np.asarray(value))
    wrong = values[~is_ok(values)]
    if wrong.size:
        raise ValueError(f"{name} must be {rule}, got {wrong[0]}")


def process_logits(
    logits: Array, sampling: Sampling, layout: Layout = WHOLE, *, greedy: bool = False
) -> Array:
    """Divide by temperature, then hide what top-k, top-p and min-p drop, in that order.

    What no row asks for is skipped when the program runs.

    Args:
      logits: [B, N, V / shards] float32.
      greedy: no row samples; the logits are kept.

    Returns the same shape; hidden entries are -inf. Rows of temperature 0 keep their logits.
    """
    if greedy:
        return logits
    temperature = jnp.where(sampling.drawn, sampling.temperature, 1.0)
    scaled = logits / temperature[:, None, None]
    keys, least = _ordered_keys(scaled), _least_keys(scaled, sampling, layout)
    return jnp.where(keys >= least[..., None], scaled, -jnp.inf)


def _least_keys(scaled: Array, sampling: Sampling, layout: Layout) -> Array:
    """Key of the smallest logit that top-k, top-p and min-p keep, 0 where they keep all:
    uint32 [B, N]."""
    nothing = jnp.zeros(scaled.shape[:-1], jnp.uint32)
    k = jnp.where(sampling.drawn, sampling.top_k, 0)
    top_p = jnp.where(sampling.drawn, sampling.top_p, 1.0)
    min_p = jnp.where(sampling.drawn, sampling.min_p, 0.0)

    def of_top_k(scaled: Array) -> Array:
        keys = _ordered_keys(scaled)
        wanted = jnp.where(k > 0, k, jnp.iinfo(jnp.int32).max).astype(jnp.float32)
        return _threshold(keys, jnp.ones_like(scaled), wanted[:, None], layout)

    def of_mass(scaled: Array) -> Array:
        # The likeliest token has weight 1.
        keys = _ordered_keys(scaled)
        weights = jnp.exp(scaled - collectives.maximum(scaled, layout)[..., None])
        weights = jnp.where(keys >= least[..., None], weights, 0.0)
        mass = top_p[:, None] * collectives.total(weights, layout)
        nucleus = _threshold(keys, weights, mass, layout)
        nucleus = jnp.where((top_p == 1)[:, None], 0, nucleus)
        likely = weights >= min_p[:, None, None]
        lowest = _lowest_key(jnp.where(likely, keys, jnp.uint32(0xFFFFFFFF)), layout)
        return jnp.maximum(nucleus, jnp.where((min_p > 0)[:, None], lowest, 0))

    least = jax.lax.cond(jnp.any(k > 0), of_top_k, lambda _: nothing, scaled)
    of_weights = jnp.any((top_p < 1) | (min_p > 0))
    return jnp.maximum(least, jax.lax.cond(of_weights, of_mass, lambda _: nothing, scaled))


def _lowest_key(keys: Array, layout: Layout) -> Array:
    """The least of keys [B, N, V / shards]: uint32 [B, N]."""
    local = jnp.min(keys, axis=-1)
    return jax.lax.pmin(local, layout.vocab) if layout.vocab else local


def _ordered_keys(x: Array) -> Array:
    """uint32 that order as the float32 values do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(keys: Array, weights: Array, wanted: Array, layout: Layout) -> Array:
    """The largest key such that entries at or above it weigh at least ``wanted``; 0 if none.

    keys and weights [B, N, V / shards], wanted [B, 1] or [B, N] -> uint32 [B, N].

    A CPU does least work bit by bit; a GPU does 15 comparisons as fast as one, and a loop of 32
    small kernels would cost more than the rest of a round (measured on an H100: 0.5 ms).
    """
    wanted = jnp.broadcast_to(wanted, keys.shape[:-1])
    return jax.lax.platform_dependent(
        keys,
        weights,
        wanted,
        cpu=functools.partial(_search_digits, digit_bits=1, layout=layout),
        default=functools.partial(_search_digits, digit_bits=4, layout=layout),
    )


def _search_digits(
    keys: Array, weights: Array, wanted: Array, *, digit_bits: int, layout: Layout
) -> Array:
    """_threshold, from the key's highest digit to its lowest."""
    digits = jnp.arange(1, 1 << digit_bits, dtype=jnp.uint32)

    def find_digit(step: Array | int, found: Array) -> Array:
        shift = jnp.uint32(32 - digit_bits) - jnp.uint32(digit_bits) * jnp.uint32(step)
        candidates = found[..., None] | digits << shift  # [B, N, digits]
        above = jnp.where(keys[:, :, None] >= candidates[..., None], weights[:, :, None], 0.0)
        enough = collectives.total(above, layout) >= wanted[..., None]
        # The smaller a candidate the more lies above it: the digit is how many suffice.
        return found | jnp.sum(enough, axis=-1, dtype=jnp.uint32) << shift

    steps, found = 32 // digit_bits, jnp.zeros(keys.shape[:-1], jnp.uint32)
    if digit_bits == 1:
        return jax.lax.fori_loop(0, steps, find_digit, found)
    for step in range(steps):  # unrolled: on a GPU a loop within a round breaks its graph
        found = find_digit(step, found)
    return found


def perturb(
    logits: Array,
    sampling: Sampling,
    positions: Array,
    token_ids: Array,
    stream: Stream = Stream.TARGET,
    *,
    greedy: bool = False,
) -> Array:
    """Processed logits [B, N, V / shards] plus the noise of ``positions`` [B, N] or [B, 1], where
    temperature is not 0; their argmax is the sampled token. ``token_ids`` [V / shards]."""
    if greedy:
        return logits
    noise = gumbel(sampling.seeds, stream, positions, token_ids)
    return jnp.where(sampling.drawn[:, None, None], logits + noise, logits)


def probabilities(logits: Array, sampling: Sampling, layout: Layout = WHOLE) -> Array:
    """softmax of processed logits [B, N, V / shards]; one-hot where temperature is 0."""
    soft = jnp.exp(collectives.log_softmax(logits, layout))
    best = collectives.one_hot(collectives.argmax(logits, layout), logits.shape[-1], layout)
    return jnp.where(sampling.drawn[:, None, None], soft, best.astype(soft.dtype))


def vocab_ids(size: int, layout: Layout) -> Array:
    """Global token ids of this shard's ``size`` logits: int32 [size]."""
    return jnp.arange(size, dtype=jnp.int32) + collectives.shard_offset(size, layout.vocab)
