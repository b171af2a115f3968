"""Log-probabilities under the model's raw logits: no control, temperature or truncation."""

from typing import NamedTuple

from jax import Array

from jaxspec.parallel import Layout, collectives
from pallas_kernels.selection import Kernels


class Logprobs(NamedTuple):
    """Of some tokens, and of the K likeliest ones in their place, the likeliest first."""

    own: Array  # float32 [...]
    top_tokens: Array | None  # int32 [..., K]; None for K = 0
    top: Array | None  # float32 [..., K]


def token_logprobs(
    logits: Array, tokens: Array, alternatives: int, layout: Layout, kernels: Kernels
) -> Logprobs:
    """log softmax(logits [..., V / shards]) at ``tokens`` [...] and at the likeliest tokens."""
    own = collectives.take(logits, tokens, layout) - collectives.log_sum_exp(logits, layout)
    if not alternatives:
        return Logprobs(own, None, None)
    top, top_tokens = collectives.top_log_probs(logits, alternatives, layout, kernels)
    return Logprobs(own, top_tokens, top)
