"""Log-probabilities of tokens: under the model's raw logits, and under the policy that samples."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxspec.decoding.sampling.logits import Sampling, process_logits
from jaxspec.parallel import Layout, collectives
from pallas_kernels.selection import NO_KERNELS, Kernels


class Logprobs(NamedTuple):
    """Log-probabilities of given tokens, and of the K likeliest in their place, in order."""

    given: Array  # float32 [...], of the given tokens
    top_tokens: Array | None  # int32 [..., K]; None for K = 0
    top: Array | None  # float32 [..., K]


def token_logprobs(
    logits: Array, tokens: Array, alternatives: int, layout: Layout, kernels: Kernels
) -> Logprobs:
    """log softmax(logits [..., V / shards]) at ``tokens`` [...] and at the likeliest tokens: no
    control, temperature or truncation changes them if the logits are raw."""
    given = collectives.take(logits, tokens, layout) - collectives.log_sum_exp(logits, layout)
    if not alternatives:
        return Logprobs(given, None, None)
    top, top_tokens = collectives.top_log_probs(logits, alternatives, layout, kernels)
    return Logprobs(given, top_tokens, top)


def policy_logprobs(
    logits: Array,
    tokens: Array,
    sampling: Sampling,
    layout: Layout,
    *,
    greedy: bool = False,
    kernels: Kernels = NO_KERNELS,
) -> Array:
    """Log-probability of ``tokens`` [B, N] as ``sampling`` draws them, after temperature and
    truncation of raw logits [B, N, V / shards]: float32 [B, N].

    It is 0 in rows of temperature 0, which take the likeliest token. ``greedy``: all do.
    """
    if greedy:
        return jnp.zeros(tokens.shape, jnp.float32)
    processed = process_logits(logits, sampling, layout, kernels=kernels)
    given = collectives.take(processed, tokens, layout) - collectives.log_sum_exp(processed, layout)
    return jnp.where(sampling.drawn[:, None], given, 0.0)
