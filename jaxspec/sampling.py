"""From logits to tokens.

The target's token at absolute position ``t`` is ``argmax(processed_logits + gumbel(seed, t))``,
an exact sample of softmax(processed_logits) by the Gumbel-max trick. The noise is a function of
(seed, position, token), so the token does not depend on how many are scored at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxspec import collectives
from jaxspec.noise import Stream, gumbel
from jaxspec.pytree import array, pytree, static


@pytree
class Sampling:
    """Sampling parameters of each request, [B] each.

    ``greedy`` and ``rules`` are static facts about the whole batch (all temperatures are 0; which
    of top_k, top_p and min_p some request uses) that leave unneeded work out of the program.
    """

    temperature: Array = array("batch")  # float32; 0 takes the likeliest token
    top_k: Array = array("batch")  # int32; 0 keeps all
    top_p: Array = array("batch")  # float32; 1 keeps all
    min_p: Array = array("batch")  # float32; 0 keeps all
    seeds: Array = array("batch")  # uint32
    greedy: bool = static()
    rules: frozenset[str] = static()


def make_sampling(
    batch: int,
    *,
    temperature: ArrayLike = 0.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    seeds: ArrayLike = 0,
) -> Sampling:
    """Sampling of ``batch`` requests from scalars or [B] arrays; ``seeds`` may be traced.

    A scalar seed serves every request as it is, so equal prompts give equal texts.

    Raises ValueError for a value out of range.
    """
    temperatures = _concrete(temperature, batch, np.float32)
    ks = _concrete(top_k, batch, np.int32)
    top_ps, min_ps = _concrete(top_p, batch, np.float32), _concrete(min_p, batch, np.float32)
    _check_range("temperature", temperatures, temperatures >= 0, "at least 0")
    _check_range("top_k", ks, ks >= 0, "at least 0 (0 keeps all tokens)")
    _check_range("top_p", top_ps, (top_ps > 0) & (top_ps <= 1), "in (0, 1]")
    _check_range("min_p", min_ps, (min_ps >= 0) & (min_ps <= 1), "in [0, 1]")
    used = {"top_k": ks > 0, "top_p": top_ps < 1, "min_p": min_ps > 0}
    return Sampling(
        temperature=jnp.asarray(temperatures),
        top_k=jnp.asarray(ks),
        top_p=jnp.asarray(top_ps),
        min_p=jnp.asarray(min_ps),
        seeds=jnp.broadcast_to(jnp.asarray(seeds).astype(jnp.uint32), (batch,)),
        greedy=bool((temperatures == 0).all()),
        rules=frozenset(rule for rule, rows in used.items() if rows.any()),
    )


def _concrete(value: ArrayLike, batch: int, dtype: type) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, dtype), (batch,))


def _check_range(name: str, values: np.ndarray, ok: np.ndarray, rule: str) -> None:
    if not ok.all():
        raise ValueError(f"{name} must be {rule}, got {values[~ok][0]}")


def process_logits(logits: Array, sampling: Sampling, axis: str | None = None) -> Array:
    """Divide by temperature, then hide what top-k, top-p and min-p drop, in that order.

    Args:
      logits: [B, N, V / shards] float32.
      axis: mesh axis the vocabulary is sharded over, or None.

    Returns the same shape; hidden entries are -inf. Rows of temperature 0 keep their logits.
    """
    if sampling.greedy:
        return logits
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    logits = logits / temperature[:, None, None]
    if not sampling.rules:
        return logits
    drawn = (sampling.temperature > 0)[:, None, None]
    return jnp.where(drawn, _truncate(logits, sampling, axis), logits)


def _truncate(logits: Array, sampling: Sampling, axis: str | None) -> Array:
    """Each rule is a threshold on the logit, found by bisection: no sort, and it shards."""
    keys, kept = _ordered_keys(logits), jnp.ones(logits.shape, bool)
    if "top_k" in sampling.rules:
        vocab = logits.shape[-1] * (1 if axis is None else jax.lax.axis_size(axis))
        k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab).astype(jnp.float32)
        kept = keys >= _threshold(keys, jnp.ones_like(logits), k[:, None], axis)[..., None]
    # The likeliest token has weight 1.
    weights = jnp.exp(logits - collectives.maximum(logits, axis)[..., None])
    weights = jnp.where(kept, weights, 0.0)
    if "top_p" in sampling.rules:
        mass = sampling.top_p[:, None] * collectives.total(weights, axis)
        nucleus = keys >= _threshold(keys, weights, mass, axis)[..., None]
        kept &= nucleus | (sampling.top_p == 1)[:, None, None]
    kept &= weights >= sampling.min_p[:, None, None]
    return jnp.where(kept, logits, -jnp.inf)


def _ordered_keys(x: Array) -> Array:
    """uint32 that order as the float32 values do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(keys: Array, weights: Array, wanted: Array, axis: str | None) -> Array:
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
        cpu=functools.partial(_search_digits, digit_bits=1, axis=axis),
        default=functools.partial(_search_digits, digit_bits=4, axis=axis),
    )


def _search_digits(
    keys: Array, weights: Array, wanted: Array, *, digit_bits: int, axis: str | None
) -> Array:
    """_threshold, from the key's highest digit to its lowest."""
    digits = jnp.arange(1, 1 << digit_bits, dtype=jnp.uint32)

    def find_digit(step: Array | int, found: Array) -> Array:
        shift = jnp.uint32(32 - digit_bits) - jnp.uint32(digit_bits) * jnp.uint32(step)
        candidates = found[..., None] | digits << shift  # [B, N, digits]
        above = jnp.where(keys[:, :, None] >= candidates[..., None], weights[:, :, None], 0.0)
        enough = collectives.total(above, axis) >= wanted[..., None]
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
) -> Array:
    """Processed logits [B, N, V / shards] plus the noise of ``positions`` [B, N] or [B, 1], where
    temperature is not 0; their argmax is the sampled token. ``token_ids`` [V / shards]."""
    if sampling.greedy:
        return logits
    noise = gumbel(sampling.seeds, stream, positions, token_ids)
    return jnp.where((sampling.temperature > 0)[:, None, None], logits + noise, logits)


def probabilities(logits: Array, sampling: Sampling, axis: str | None = None) -> Array:
    """softmax of processed logits [B, N, V / shards]; one-hot where temperature is 0."""
    soft = jnp.exp(collectives.log_softmax(logits, axis))
    best = collectives.one_hot(collectives.argmax(logits, axis), logits.shape[-1], axis)
    return jnp.where((sampling.temperature > 0)[:, None, None], soft, best.astype(soft.dtype))


def vocab_ids(size: int, axis: str | None) -> Array:
    """Global token ids of this shard's ``size`` logits: int32 [size]."""
    return jnp.arange(size, dtype=jnp.int32) + collectives.shard_offset(size, axis)
