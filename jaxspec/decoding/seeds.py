"""Seeds of the samples of prompts, as functions of what a caller knows of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxspec.config.checks import check_count, is_integer
from jaxspec.decoding.sampling.logits import check_integers
from jaxspec.decoding.sampling.noise import threefry
from jaxspec.parallel.array_checks import Integers, as_array


def group_seeds(
    key: ArrayLike, prompt_ids: Integers, num_samples: int, *, epoch: ArrayLike = 0
) -> Array:
    """Seeds of ``num_samples`` samples of each prompt: uint32 [B, S], for make_sampling.

    They depend on key, prompt id and epoch only: not on the prompt's place in a batch. Those of one
    prompt and epoch are S consecutive numbers, so no two are equal. Between prompts or epochs a
    collision is as unlikely as of random numbers of 32 bits.

    A training that samples a prompt again should do so in another epoch: the same noise shows the
    same part of the policy, and what was learned from it is then not tested by new samples.

    Args:
      key: of the run: an integer from 0 to 2**64 - 1 (of a traced one the last 32 bits), or a typed
        key, as ``jax.random.key`` makes it.
      prompt_ids: integers [B] that tell prompts from one another, such as their numbers in a data
        set; of each the last 32 bits.
      epoch: an integer.

    ``key``, ``prompt_ids`` and ``epoch`` may be traced.

    Raises ValueError for other shapes and dtypes, and for num_samples below 1.
    """
    check_count("num_samples", num_samples)
    words, prompt_ids = _words_of(key), as_array(prompt_ids)
    check_integers("prompt_ids", prompt_ids)
    check_integers("epoch", epoch)
    if np.ndim(prompt_ids) != 1 or np.ndim(epoch) != 0:
        raise ValueError(
            "prompt_ids must be integers [B] and epoch an integer, got shapes "
            f"{list(np.shape(prompt_ids))} and {list(np.shape(epoch))}"
        )
    first = threefry(*words, _low_word(prompt_ids), _low_word(epoch))
    return first[:, None] + jnp.arange(num_samples, dtype=jnp.uint32)


def _words_of(key: ArrayLike) -> tuple[ArrayLike, ArrayLike]:
    """Two words of 32 bits. Raises ValueError for what is no key."""
    if isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim:
            raise ValueError(f"key must be one key, got keys of shape {list(key.shape)}")
        first, second = jax.random.bits(key, (2,), jnp.uint32)
        return first, second
    check_integers("key", key)
    if np.ndim(key):
        raise ValueError(
            f"key must be an integer or a key, got shape {list(np.shape(key))}: take "
            "jax.random.key where that is a raw PRNGKey"
        )
    if not is_integer(key):
        return _low_word(key), np.uint32(0)
    if not 0 <= key < 2**64:
        raise ValueError(f"key must be 0 to 2**64 - 1, got {key}")
    return np.uint32(int(key) % 2**32), np.uint32(int(key) >> 32)


def _low_word(value: ArrayLike) -> Array:
    """The last 32 bits of integers: uint32."""
    if isinstance(value, Array):
        return value.astype(jnp.uint32)
    return jnp.asarray((np.asarray(value) & 0xFFFFFFFF).astype(np.uint32))
