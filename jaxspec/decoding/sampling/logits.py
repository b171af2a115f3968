"""Temperature, truncation and noise.

The target's token at absolute position ``t`` is ``argmax(processed_logits + gumbel(seed, t))``,
an exact sample from softmax(processed_logits) by the Gumbel-max trick. The noise is a function of
(seed, position, token), so a token does not depend on how many are scored in the same pass.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jaxspec.config.checks import Problems, check_count
from jaxspec.config.seeds import seeds_of_keys
from jaxspec.decoding.sampling.noise import Stream, gumbel
from jaxspec.parallel import WHOLE, Layout, collectives
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.selection import NO_KERNELS, Kernels
from pallas_kernels.truncate import truncation_threshold
from pallas_kernels.truncate.reference import truncation_threshold_reference

type Rule = tuple[Callable[[np.ndarray], np.ndarray], str]
_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "temperature": (lambda x: x >= 0, "at least 0"),
        "top_k": (lambda x: x >= 0, "at least 0 (0 keeps all tokens)"),
        "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
        "min_p": (lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
        "seeds": (lambda x: (x >= 0) & (x < 2**32), "0 to 2**32 - 1"),
    }
)
_INTEGERS = ("top_k", "seeds")


@pytree
class Sampling(Pytree):
    """Sampling parameters of each row, [B] each. All are data: no value causes a compilation."""

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
    """Sampling of ``batch`` rows, from scalars or [B] arrays, which may be traced.

    A scalar seed, the default too, gives row ``i`` the seed ``seeds + i``, so equal prompts of one
    call give different samples, and the same call again gives the same. An array of equal seeds
    gives equal samples, and so do calls of one row each that have the same seed.

    Args:
      seeds: integers from 0 to 2**32 - 1 (of traced ones the last 32 bits), or typed keys, as
        ``jax.random.key`` and ``split`` make them (not raw ones of PRNGKey). A key stands for the
        seed that ``jax.random.bits(key, dtype=uint32)`` draws.

    Raises ValueError for a value out of range (traced values are not checked), and for arrays of
    other shapes or dtypes.
    """
    check_count("batch", batch)
    if isinstance(seeds, Array) and jnp.issubdtype(seeds.dtype, jax.dtypes.prng_key):
        seeds = seeds_of_keys(seeds)
    given = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds)
    problems = Problems()
    for name, value in given.items():
        with problems.caught():
            if name in _INTEGERS:
                check_integers(name, value)
            check_range(name, value, *_RULES[name])
            check_size(name, value, batch)
    problems.raise_all()
    if np.ndim(seeds) == 0:
        first = seeds if isinstance(seeds, Array) else np.asarray(seeds)
        seeds = first.astype(np.uint32) + np.arange(batch, dtype=np.uint32)
    return Sampling(
        temperature=per_row(temperature, batch, jnp.float32),
        top_k=per_row(top_k, batch, jnp.int32),
        top_p=per_row(top_p, batch, jnp.float32),
        min_p=per_row(min_p, batch, jnp.float32),
        seeds=per_row(seeds, batch, jnp.uint32),
    )


def check_size(name: str, value: ArrayLike, batch: int) -> None:
    """Raise ValueError for what is neither a scalar nor [B]."""
    if (shape := np.shape(value)) not in ((), (batch,)):
        is_raw_key = name == "seeds" and shape[-1:] == (2,)
        cure = ": take jax.random.key where that is a raw PRNGKey" if is_raw_key else ""
        raise ValueError(
            f"{name} must be a scalar or [{batch}], a value for each row, got shape "
            f"{list(shape)}{cure}"
        )


def check_integers(name: str, value: ArrayLike) -> None:
    """Raise ValueError for other values than integers."""
    dtype = value.dtype if isinstance(value, Array) else np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        shown = value if np.ndim(value) == 0 and not isinstance(value, Array) else dtype
        raise ValueError(f"{name} must be integers, got {shown!r}")


def per_row(value: ArrayLike, batch: int, dtype: DTypeLike) -> Array:
    """A scalar or [B] array as [B]."""
    if isinstance(value, Array):
        return jnp.broadcast_to(value.astype(dtype), (batch,))
    # By NumPy: of jax each size would be a program, and it would take a large Python int for an
    # int32.
    return jax.device_put(np.broadcast_to(np.asarray(value).astype(dtype), (batch,)))


def check_range(name: str, value: ArrayLike, is_ok: Callable, rule: str) -> None:
    """Raise ValueError with ``rule`` for the first wrong value; traced ones are not checked."""
    if isinstance(value, Tracer):
        return
    values = np.atleast_1d(np.asarray(value))
    if not jnp.issubdtype(values.dtype, jnp.number):
        raise ValueError(f"{name} must be numbers, got {value!r}")
    wrong = values[~is_ok(values)]
    if wrong.size:
        raise ValueError(f"{name} must be {rule}, got {wrong[0]}")


def process_logits(
    logits: Array,
    sampling: Sampling,
    layout: Layout = WHOLE,
    *,
    greedy: bool = False,
    kernels: Kernels = NO_KERNELS,
) -> Array:
    """Divide by temperature, then apply top-k, top-p and min-p, in that order.

    Steps that no row needs are skipped at run time.

    Args:
      logits: [B, N, V / shards] float32.
      greedy: no row samples; the logits are returned unchanged.

    Returns the same shape; dropped entries are -inf. Rows of temperature 0 keep their logits. What
    is dropped has no gradient, nor has the choice of it.
    """
    if greedy:
        return logits
    drawn = sampling.drawn
    temperature = jnp.where(drawn, sampling.temperature, 1.0)
    rules = (
        temperature,
        jnp.where(drawn, sampling.top_k, 0),
        jnp.where(drawn, sampling.top_p, 1.0),
        jnp.where(drawn, sampling.min_p, 0.0),
    )
    constant = lax.stop_gradient(logits)
    if layout.vocab:
        reductions = collectives.Reductions(layout)
        threshold = truncation_threshold_reference(constant, *rules, reductions)
    else:
        threshold = truncation_threshold(constant, *rules, kernels.implementation("truncate"))
    # Raw logits are compared, because two programs may round the quotient differently. NaN is not
    # hidden by this comparison.
    hidden = logits < threshold[..., None]
    return jnp.where(hidden, -jnp.inf, logits / temperature[:, None, None])


def perturb(
    logits: Array,
    sampling: Sampling,
    positions: Array,
    token_ids: Array,
    stream: Stream = Stream.TARGET,
    *,
    greedy: bool = False,
) -> Array:
    """Add noise to processed logits [B, N, V / shards]: the argmax is then the sampled token.

    Rows of temperature 0 get no noise. ``positions`` is [B, N] or [B, 1], ``token_ids``
    [V / shards].
    """
    if greedy:
        return logits
    noise = gumbel(sampling.seeds, stream, positions, token_ids)
    return jnp.where(sampling.drawn[:, None, None], logits + noise, logits)


def probabilities(logits: Array, sampling: Sampling, layout: Layout = WHOLE) -> Array:
    """softmax of processed logits [B, N, V / shards]; one-hot for rows of temperature 0."""
    soft = jnp.exp(collectives.log_softmax(logits, layout))
    best = collectives.one_hot(collectives.argmax(logits, layout), logits.shape[-1], layout)
    return jnp.where(sampling.drawn[:, None, None], soft, best.astype(soft.dtype))


def vocab_ids(size: int, layout: Layout) -> Array:
    """Global token ids of this shard's ``size`` logits: int32 [size]."""
    return jnp.arange(size, dtype=jnp.int32) + collectives.shard_offset(size, layout.vocab)
