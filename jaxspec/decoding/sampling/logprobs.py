"""Log-probabilities under the model's raw logits: no control, temperature or truncation."""

from typing import NamedTuple

from jax import Array

from jaxspec.parallel import Layout, collectives
from pallas_kernels.selection import Kernels


class Logprobs(NamedTuple):
    """Log-probabilities of given tokens, and of the K likeliest in their place, in order."""

    given: Array  # float32 [...], of the given tokens
    top_tokens: Array | None  # int32 [..., K]; None for K = 0
    top: Array | None  # float32 [..., K]


def token_logprobs(
    logits: Array, tokens: Array, alternatives: int, layout: Layout, kernels: Kernels
) -> Logprobs:
    """log softmax(logits [..., V / shards]) at ``tokens`` [...] and at the likeliest tokens."""
    given = collectives.take(logits, tokens, layout) - collectives.log_sum_exp(logits, layout)
    if not alternatives:
        return Logprobs(given, None, None)
    top, top_tokens = collectives.top_log_probs(logits, alternatives, layout, kernels)
    return Logprobs(given, top_tokens, top)
