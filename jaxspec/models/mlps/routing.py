"""Which experts each token goes through, and with which weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.experts import RoutingConfig

LEAST_SUM = 1e-20  # added to sums of scores that are divided by: sigmoids may all be 0


class Routes(NamedTuple):
    """The chosen experts of N tokens, the best first.

    Attributes:
      experts: int32 [N, k], distinct in each row.
      weights: float32 [N, k].
    """

    experts: Array
    weights: Array


@jax.named_scope("routing")
def choose_experts(
    logits: Array,  # float32 [N, E]
    config: RoutingConfig,
    correction: Array | None = None,  # float32 [E]
) -> Routes:
    """The routes of N tokens. A row depends on its own logits only; of equals, lower indices are
    chosen first, on every device."""
    scores = _scores(logits, config)
    ranked = scores if correction is None else scores + correction
    if config.num_groups > 1:
        ranked = _of_best_groups(ranked, config)
    _, experts = lax.top_k(ranked, config.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.scores == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if config.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM)
    return Routes(experts, weights * config.scale)


def _scores(logits: Array, config: RoutingConfig) -> Array:
    """Scores by which experts are chosen: float32 [N, E]."""
    match config.scores:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "chosen":
            return logits


def _of_best_groups(ranked: Array, config: RoutingConfig) -> Array:
    """Scores [N, E], -inf for experts outside of the best groups."""
    groups = ranked.reshape(len(ranked), config.num_groups, -1)
    best_two, _ = lax.top_k(groups, 2)
    _, chosen = lax.top_k(jnp.sum(best_two, axis=-1), config.top_groups)
    is_chosen = jnp.any(chosen[..., None] == jnp.arange(config.num_groups), axis=1)
    return jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(ranked.shape)
