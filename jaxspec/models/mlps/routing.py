"""Which experts each token goes through, and with which weights."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.experts import RoutingConfig
from pallas_kernels.expert_slots import Slots

# (float32 [N, E], k) -> the k largest entries of a row, their indices, and its log-sum-exp
TopK = Callable[[Array, int], tuple[Array, Array, Array]]

LEAST_SUM = 1e-20  # added to sums of scores that are divided by: sigmoids may all be 0


class Routes(NamedTuple):
    """The chosen experts of N tokens, the best first.

    Attributes:
      experts: int32 [N, k], distinct in each row.
      weights: float32 [N, k].
      slots: of pairs of a row and an expert, if the kernel of routes has found them.
    """

    experts: Array
    weights: Array
    slots: Slots | None = None

    def without_last(self) -> "Routes":
        """Those without the last choice of each row."""
        slots = self.slots
        if slots is not None:
            slots = slots._replace(places=slots.places[:, :-1])
        return Routes(self.experts[:, :-1], self.weights[:, :-1], slots)


@jax.named_scope("routing")
def choose_experts(
    logits: Array,  # float32 [N, E]
    config: RoutingConfig,
    correction: Array | None,  # float32 [E]
    top_k: TopK,
) -> Routes:
    """The routes of N tokens. A row depends on its own logits only; of equals, lower indices are
    chosen first, on every device."""
    if correction is None and config.num_groups == 1:  # scores are in the order of logits
        largest, experts, log_sum = top_k(logits, config.top_k)
        weights = _scores(largest, log_sum[:, None], config)
    else:
        scores = _scores(logits, jax.nn.logsumexp(logits, axis=-1, keepdims=True), config)
        ranked = scores if correction is None else scores + correction
        if config.num_groups > 1:
            ranked = _of_best_groups(ranked, config)
        _, experts, _ = top_k(ranked, config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.scores == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    return _routes(experts, weights, config)


@jax.named_scope("routing")
def routes_of_tokens(
    logits: Array,  # float32 [N, E]
    config: RoutingConfig,
    table: Array,  # int32 [V, k]
    tokens: Array,  # int [N]
) -> Routes:
    """The routes of N tokens whose ids say which experts they go through."""
    experts = table[tokens]
    scores = _scores(logits, jnp.zeros((len(logits), 1)), config)
    return _routes(experts, jnp.take_along_axis(scores, experts, axis=-1), config)


def _routes(experts: Array, weights: Array, config: RoutingConfig) -> Routes:
    """The routes to experts [N, k] by their scores."""
    if config.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM)
    return Routes(experts, weights * config.scale)


def _scores(logits: Array, log_sum: Array, config: RoutingConfig) -> Array:
    """Scores of logits [N, ...], by which experts are chosen; ``log_sum`` [N, 1] is of all."""
    match config.scores:
        case "softmax":
            return jnp.exp(logits - log_sum)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "sqrt_softplus":
            return jnp.sqrt(jax.nn.softplus(logits))
        case "chosen":
            return logits


def _of_best_groups(ranked: Array, config: RoutingConfig) -> Array:
    """Scores [N, E], -inf for experts outside of the best groups."""
    groups = ranked.reshape(len(ranked), config.num_groups, -1)
    best_two, _ = lax.top_k(groups, 2)
    _, chosen = lax.top_k(jnp.sum(best_two, axis=-1), config.top_groups)
    is_chosen = jnp.any(chosen[..., None] == jnp.arange(config.num_groups), axis=1)
    return jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(ranked.shape)
