"""Training of a draft head: initial weights and the jitted step.

Weights and AdamW moments are float32; the target and the activations are ``compute_dtype``.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxspec.config.model import ModelConfig
from jaxspec.config.mtp import MtpConfig
from jaxspec.models.decoder import Decoder, norm_copy
from jaxspec.models.heads import (
    BlockHead,
    DraftHead,
    EagleMethod,
    HeadConfig,
    check_capture,
    default_capture,
    head_shapes,
    mtp_head_config,
)
from jaxspec.parallel.pytree import Pytree, pytree
from jaxspec.training.heads.loss import DraftBatch, Loss, LossConfig, check_unrolled
from jaxspec.training.initial import init_layers, reads_last
from jaxspec.training.optimizer import OptimizerConfig, adamw, descend, learning_rate
from jaxspec.training.precision import attention_of, cast_weights

Head = DraftHead | BlockHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTrainConfig(OptimizerConfig):
    """How to train a head.

    Attributes:
      loss: of the head's method: a LossConfig, or a BlockLoss.
      batch_size: sequences of one step.
      accumulation: micro-batches of a step; their gradients are added up, which saves memory.
    """

    loss: Loss = dataclasses.field(default_factory=LossConfig)
    batch_size: int = 32
    accumulation: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if min(self.batch_size, self.accumulation) < 1 or self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size must be a multiple of accumulation, got {self.batch_size} and "
                f"{self.accumulation}"
            )


@pytree
class DraftTrainState[H: Head](Pytree):
    """Everything that a step updates. ``step``, int32 [], counts the steps taken."""

    head: H  # float32
    moments: optax.OptState
    step: Array


def init_head(
    target: Decoder,
    config: ModelConfig,
    method: EagleMethod,
    *,
    capture: tuple[int, ...] | None = None,
    token_ids: np.ndarray | None = None,
    seed: int = 0,
) -> DraftHead:
    """A float32 head to train, with random weights except for these.

    ``fc`` starts as the identity on the last captured state (EAGLE-1: on the hidden state).
    EAGLE-3's LM head and norm start as copies of the target's.

    Args:
      config: config of the head's own layers.
      token_ids: target ids of the draft vocabulary [W], ascending; None for the whole vocabulary.
    """
    if min([config.num_layers, *(layer.units for layer in config.layers)]) < 1:
        raise ValueError("a head needs at least one layer, and an MLP of at least one unit")
    if method == "eagle1" and (capture or token_ids is not None):
        raise ValueError("an EAGLE-1 head reads the last hidden state and drafts every token")
    num_layers = target.config.num_layers
    capture = capture or default_capture(method, num_layers)
    if method == "eagle3":
        capture = check_capture(capture, num_layers)
    size = None if token_ids is None else len(token_ids)
    described = HeadConfig(config, method, capture, draft_vocab_size=size)
    shapes = head_shapes(described, target.config, jnp.dtype(jnp.float32))
    head: Any = init_layers(trainable(shapes), config.num_layers, seed)
    fc, hidden = reads_last(head.front.fc, target.config.hidden_size), config.hidden_size
    head = head.replace(front=head.front.replace(fc=fc))
    if method == "eagle1":
        return head
    ids = None if token_ids is None else jnp.asarray(token_ids, jnp.int32)
    if hidden == target.config.hidden_size:
        rows = target.embed if target.lm_head is None else target.lm_head.weight.T
        rows = rows[: target.config.vocab_size] if ids is None else rows[ids]
        # Copies, as training donates its state and the target's arrays must stay valid.
        weight = jnp.array(rows.T, jnp.float32)
        lm_head = head.lm_head.replace(weight=weight)
        head = head.replace(lm_head=lm_head, norm=norm_copy(target))
    return head.replace(token_ids=ids)


def init_mtp_layer(target: Decoder, mtp: MtpConfig, seed: int = 0) -> DraftHead:
    """A float32 MTP layer to train: a copy of the target's last layer of its kind and of the final
    norm, that reads the hidden state, and the embedding a little.

    ``mtp``: how its family names such a layer (see models.from_config.model).

    Raises ValueError for a target whose last such layer is quantized, or has latent attention, or
    that has none.
    """
    config = mtp_head_config(target.config, mtp)
    shapes = head_shapes(config, target.config, jnp.dtype("float32"))
    check_unrolled(config.model)
    [head_layer] = config.model.layers
    places = [index for index, layer in enumerate(target.config.layers) if layer == head_layer]
    if not places:
        raise ValueError(
            "an MTP layer begins as a copy of a layer of the model, and config.json describes one "
            "that is like none of them"
        )
    last = target.layers[places[-1]]
    if jax.tree.structure(last) != jax.tree.structure(shapes.layers[0]):
        raise ValueError("an MTP layer is trained for a model whose weights are not quantized")
    hidden = target.config.hidden_size
    noise = np.random.default_rng(seed).standard_normal((2 * hidden, hidden), np.float32)
    weight = jnp.asarray(0.1 * noise * (2 * hidden) ** -0.5).at[hidden:].add(jnp.eye(hidden))
    norms: Any = {name: jnp.ones(hidden, jnp.float32) for name in ("embed_norm", "hidden_norm")}
    front: Any = shapes.front
    return shapes.replace(
        front=front.replace(fc=front.fc.replace(weight=weight), **norms),
        # Copies, as training donates its state and the target's arrays must stay valid.
        layers=(jax.tree.map(lambda x: jnp.array(x, jnp.float32), last),),
        norm=norm_copy(target),
    )


def trainable[H: Head](head: H) -> H:
    """The head without its table of token ids, which is not trained."""
    return head.replace(token_ids=None) if isinstance(head, DraftHead) else head


def _completed[H: Head](weights: H, head: H) -> H:
    """Trained weights with what ``trainable`` took of ``head``."""
    if isinstance(weights, DraftHead) and isinstance(head, DraftHead):
        return weights.replace(token_ids=head.token_ids)
    return weights


def init_state[H: Head](head: H, config: DraftTrainConfig) -> DraftTrainState[H]:
    """Raises ValueError for a loss that is of another kind of heads."""
    config.loss.check(head)
    weights: Any = trainable(head)
    return DraftTrainState(
        head=head, moments=adamw(config).init(weights), step=jnp.zeros((), jnp.int32)
    )


def train_step[H: Head](
    state: DraftTrainState[H],
    target: Decoder,
    batch: DraftBatch,
    total_steps: Array,
    config: DraftTrainConfig,
) -> tuple[DraftTrainState[H], dict[str, Array]]:
    """One AdamW step; a pure function, to be jitted by the caller.

    Args:
      target: in the compute dtype; not trained.
      batch: B rows, computed in ``config.accumulation`` micro-batches.

    Metrics are float32: ``loss``, ``accuracy`` and ``overlap`` [steps] (see Loss; of a block
    head see BlockLoss), and ``total_loss``, ``grad_norm``, ``learning_rate`` [].
    """
    # Counted over the whole batch, so that every learned token has the same weight, however the
    # tokens are distributed over the micro-batches.
    counts = config.loss.counts(batch) / config.accumulation

    def loss(weights: Head, part: DraftBatch) -> tuple[Array, dict[str, Array]]:
        working = cast_weights(_completed(weights, state.head), config.compute_dtype)
        return config.loss(working, target, part, attention_of(config.attention), counts)

    weights: Any = trainable(state.head)
    parts = jax.tree.map(lambda x: _parts(x, config.accumulation), batch)

    def add(sums: Any, part: DraftBatch) -> tuple[Any, None]:
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(weights, part)
        return jax.tree.map(jnp.add, sums, (metrics | {"total_loss": value}, gradients)), None

    zeros = jax.tree.map(jnp.zeros_like, _shapes(loss, weights, parts))
    sums, _ = jax.lax.scan(add, zeros, parts)
    metrics, gradients = jax.tree.map(lambda x: x / config.accumulation, sums)
    rate = learning_rate(config, state.step, total_steps)
    weights, moments, norm = descend(config, weights, state.moments, gradients, rate)
    head = _completed(weights, state.head)
    state = DraftTrainState(head=head, moments=moments, step=state.step + 1)
    return state, metrics | {"grad_norm": norm, "learning_rate": rate}


def _parts(x: Array, count: int) -> Array:
    """Micro-batches: x [B, ...] -> [count, B / count, ...].

    Each takes every ``count``-th row, so that its rows lie on all devices of a split batch.
    """
    return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)


def _shapes(loss: Any, weights: Head, parts: DraftBatch) -> tuple[Any, Any]:
    """(metrics, gradients) as ShapeDtypeStructs, to allocate the sums."""
    part = jax.tree.map(lambda x: x[0], parts)
    value, metrics = jax.eval_shape(loss, weights, part)
    return metrics | {"total_loss": value}, weights


one_step = jax.jit(train_step, static_argnames=("config",), donate_argnames=("state",))


def train_steps[H: Head](
    state: DraftTrainState[H],
    target: Decoder,
    batches: Sequence[DraftBatch],
    total_steps: int,
    config: DraftTrainConfig,
) -> tuple[DraftTrainState[H], dict[str, np.ndarray]]:
    """One step on each batch. One program serves any number of batches.

    Waits for the results, and returns the means of the metrics; of the learning rate, the last.
    """
    taken: list[Any] = []
    for batch in batches:
        state, metrics = one_step(state, target, batch, total_steps, config)
        taken.append(metrics)
    host = jax.device_get(taken)
    means = {name: np.mean([metrics[name] for metrics in host], axis=0) for name in host[0]}
    return state, means | {"learning_rate": host[-1]["learning_rate"]}


@functools.partial(jax.jit, static_argnames=("config",))
def evaluate(
    head: Head, target: Decoder, batches: DraftBatch, config: DraftTrainConfig
) -> dict[str, Array]:
    """The metrics of the loss: means over the learned tokens of batches [S, B, ...]."""
    working = cast_weights(head, config.compute_dtype)
    attend = attention_of(config.attention)

    def run(batch: DraftBatch) -> tuple[Array, dict[str, Array]]:
        counts = config.loss.counts(batch)
        return counts, config.loss(working, target, batch, attend, counts)[1]

    counts, metrics = jax.lax.map(run, batches)  # [S, steps]
    weights = counts / counts.sum(axis=0)
    return {name: (weights * values).sum(axis=0) for name, values in metrics.items()}
