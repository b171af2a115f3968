"""Training of a target model: initial weights, loss, and the jitted step.

Weights and AdamW moments are float32, activations ``compute_dtype``. A batch is a function of the
seed and the step number alone, so a resumed run gives the same result as an uninterrupted one.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding

from jaxspec.config.model import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import of_whole_sequences
from jaxspec.models.forward_pass import Attend
from jaxspec.parallel.pytree import Pytree, pytree
from jaxspec.training.held_out import batches_of
from jaxspec.training.initial import init_decoder
from jaxspec.training.optimizer import (
    OptimizerConfig,
    adamw,
    descend,
    learning_rate,
)
from jaxspec.training.precision import attention_of, cast_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(OptimizerConfig):
    """How to train. ``context``: predicted tokens of each training sequence."""

    batch_size: int = 128
    context: int = 1024

    def __post_init__(self):
        super().__post_init__()
        if min(self.batch_size, self.context) < 1:
            raise ValueError("batch_size and context must be at least 1")


@pytree
class TrainState(Pytree):
    """Everything that a step updates. ``step``, int32 [], counts the steps taken."""

    params: Decoder  # float32
    moments: optax.OptState
    step: Array


def num_parameters(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def loss(
    params: Decoder, batch: Array, attend: Attend = dense_causal_attend, dtype: Any = jnp.bfloat16
) -> Array:
    """Mean cross entropy, float32 [], of each token of int32 [B, T + 1] given those before it."""
    working = cast_weights(params, dtype)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    scores = decoder.logits(working, of_whole_sequences(working, inputs, attend))
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def init_state(model: ModelConfig, config: TrainConfig) -> TrainState:
    params: Any = init_decoder(model, config.seed)
    return TrainState(
        params=params, moments=adamw(config).init(params), step=jnp.zeros((), jnp.int32)
    )


def train_step(
    state: TrainState, batch: Array, total_steps: Array, config: TrainConfig
) -> tuple[TrainState, dict[str, Array]]:
    """One AdamW step on int32 [B, T + 1]; metrics are float32 []: loss, grad_norm,
    learning_rate."""
    params: Any = state.params
    value, gradients = jax.value_and_grad(loss)(
        params, batch, attention_of(config.attention), jnp.dtype(config.compute_dtype)
    )
    rate = learning_rate(config, state.step, total_steps)
    params, moments, norm = descend(config, params, state.moments, gradients, rate)
    metrics = {"loss": value, "grad_norm": norm, "learning_rate": rate}
    return TrainState(params=params, moments=moments, step=state.step + 1), metrics


def sample_batch(tokens: Array, step: Array, config: TrainConfig) -> Array:
    """int32 [B, T + 1]: windows of tokens [N] at random offsets, fixed by the seed and step."""
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    last = tokens.shape[0] - config.context
    offsets = jax.random.randint(key, (config.batch_size, 1), 0, last)
    return tokens[offsets + jnp.arange(config.context + 1)].astype(jnp.int32)


@functools.partial(
    jax.jit, static_argnames=("config", "batch_sharding"), donate_argnames=("state",)
)
def train_steps(
    state: TrainState,
    tokens: Array,
    num_steps: Array,
    total_steps: Array,
    config: TrainConfig,
    batch_sharding: NamedSharding | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """``num_steps`` steps in one call, on batches drawn from tokens [N] on the device.

    Returns the state and the last step's metrics, except that ``loss`` is the mean over the steps.
    """

    def body(_: Array, carry: tuple[TrainState, dict[str, Array]]):
        state, sums = carry
        batch = sample_batch(tokens, state.step, config)
        if batch_sharding is not None:
            batch = jax.lax.with_sharding_constraint(batch, batch_sharding)
        state, metrics = train_step(state, batch, total_steps, config)
        return state, metrics | {"loss": sums["loss"] + metrics["loss"]}

    zero = jnp.zeros((), jnp.float32)
    sums = {"loss": zero, "grad_norm": zero, "learning_rate": zero}
    state, metrics = jax.lax.fori_loop(0, num_steps, body, (state, sums))
    return state, metrics | {"loss": metrics["loss"] / num_steps}


def held_out_windows(tokens: np.ndarray, config: TrainConfig, max_tokens: int) -> np.ndarray:
    """Evenly spaced windows int32 [E, B, T + 1] of tokens [N], about ``max_tokens`` in all.

    If there are fewer windows than one batch, the batch size is halved until there are enough.
    Raises ValueError for less text than one window.
    """
    width = config.context + 1
    if len(tokens) < width:
        raise ValueError(
            f"the held-out text has {len(tokens)} tokens and needs at least {config.context + 1}, "
            "the context and one: give more data or a smaller context"
        )
    batches, size = batches_of(min(len(tokens), max_tokens) // width or 1, config.batch_size)
    count = batches * size
    starts = [i * (len(tokens) - width) // max(count - 1, 1) for i in range(count)]
    rows = [tokens[start : start + width] for start in starts]
    return np.stack(rows).astype(np.int32).reshape(batches, size, width)


@functools.partial(jax.jit, static_argnames=("config",))
def evaluate(params: Decoder, windows: Array, config: TrainConfig) -> Array:
    """Mean cross entropy, float32 [], over windows int32 [E, B, T + 1]."""
    dtype = jnp.dtype(config.compute_dtype)
    return jax.lax.map(
        lambda w: loss(params, w, attention_of(config.attention), dtype), windows
    ).mean()


@jax.jit
def continue_text(
    params: Decoder, tokens: Array, length: Array, temperature: Array, key: Array
) -> Array:
    """Fill int32 [T] from position ``length`` on; temperature 0 is greedy.

    There is no cache: each token recomputes the whole text. It is for short samples only.
    """

    def body(i: Array, tokens: Array) -> Array:
        hidden = of_whole_sequences(params, tokens[None])
        scores = decoder.logits(params, hidden[0, i - 1])
        noise = jax.random.gumbel(jax.random.fold_in(key, i), scores.shape)
        return tokens.at[i].set(jnp.argmax(scores + temperature * noise).astype(tokens.dtype))

    return jax.lax.fori_loop(length, tokens.shape[0], body, tokens)
