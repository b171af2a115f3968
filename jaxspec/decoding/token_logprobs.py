"""Log-probabilities of the tokens of texts, with gradients: what losses of RL are made of."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxspec.config.checks import check_count
from jaxspec.decoding.blocks import map_blocks
from jaxspec.decoding.sampling import logprobs, make_sampling, policy_logprobs
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import hidden_states, logits_of, within
from jaxspec.parallel import WHOLE, collectives
from jaxspec.parallel.array_checks import Integers
from pallas_kernels.selection import NO_KERNELS

SCORED_AT_ONCE = 1024  # tokens of all rows whose logits are in memory together, by default


def token_logprobs(
    target: Decoder,
    tokens: Integers,
    lengths: Integers | None = None,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    mesh: Mesh | None = None,
    remat: bool = False,
    chunk: int | None = None,
) -> Array:
    """Log-probability of each token after those before it: float32 [B, T].

    Entry t is log p(tokens[t] given tokens[:t]). It is 0 for t = 0 and past a row's length. By
    default p is the model's own distribution, as that of ``logprobs`` of ``decode`` and of
    Completion; with a temperature, top-k, top-p or min-p it is the policy that samples so, as that
    of ``policy_logprobs``. They agree up to rounding: an engine computes them in other shapes.

    A policy gives tokens that it cuts off -inf, as it does at temperature 0 to all but the
    likeliest. Gradients are of the target (see hidden_states), not of the policy's parameters; the
    choice of what is cut off has none.

    Args:
      target, tokens, lengths, mesh, remat: see hidden_states.
      temperature: numbers or arrays [B], at least 0, which may be traced.
      top_k, top_p, min_p: see SamplingParams; numbers or arrays [B], which may be traced.
      chunk: positions of all rows whose logits, [B, chunk, V], are in memory together; a gradient
        computes them again. None: so many that they are about 1,024 tokens.

    Raises ValueError as hidden_states and make_sampling do, and for a chunk below 1.
    """
    if chunk is not None:
        check_count("chunk", chunk)
    hidden = hidden_states(target, tokens, lengths, mesh=mesh, remat=remat)
    batch, length, _ = hidden.shape
    size = chunk or max(1, SCORED_AT_ONCE // max(1, batch))
    rules: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = jax.tree.map(lax.stop_gradient, make_sampling(batch, **rules))
    is_raw = all(map(_is_number, rules.values(), (1, 0, 1, 0)))

    @jax.checkpoint
    def score(block: tuple[Array, Array]) -> Array:
        hidden, tokens = block
        logits = logits_of(target, hidden, mesh)
        if is_raw:
            return logprobs.token_logprobs(logits, tokens, 0, WHOLE, NO_KERNELS).given
        scores = policy_logprobs(logits, tokens, sampling, WHOLE)
        likeliest = collectives.argmax(logits, WHOLE)
        certain = sampling.drawn[:, None] | (tokens == likeliest)
        return jnp.where(certain, scores, -jnp.inf)

    if length == 1:
        return jnp.zeros((batch, 1), jnp.float32)
    following = hidden[:, :-1], jnp.asarray(tokens)[:, 1:]
    scores = map_blocks(score, following, min(size, length - 1))
    return within(lengths, jnp.pad(scores, ((0, 0), (1, 0))))


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and value == number
