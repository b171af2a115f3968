"""The loss of a draft head, unrolled on its own outputs (EAGLE-3's training-time test).

While drafting, a head reads true features of the target up to the root, and its own outputs after
the root. Training imitates that at every position at once (arXiv 2503.01840, section 3.2). Step 1
reads true features everywhere; step ``s`` reads the outputs of step ``s - 1``. A query of step
``s`` at position ``i`` attends to what would be in the cache when drafting there: the entries of
step 1 up to ``i - s + 1``, and the entry of step ``r`` at ``i - s + r``, for ``r = 2 .. s``.
The layers are the same as in serving; only the attention function differs.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.attention_heads import Heads
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend
from jaxspec.models.heads import DraftHead
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.paged_attention.reference import MASKED, capped
from pallas_kernels.products import einsum_f32

StepKeys = tuple[tuple[Array, Array], ...]  # keys and values [B, T, G, D] of the steps so far


@pytree
class DraftBatch(Pytree):
    """Token sequences, and a mask of the tokens that a head is trained to predict.

    For a block head, ``anchors``: see BlockLoss.
    """

    tokens: Array = array("batch", "length")  # int32 [B, T]
    learned: Array = array("batch", "length")  # bool [B, T]
    anchors: Array | None = array("batch", "alternatives", default=None)  # int32 [B, A]


class Loss(abc.ABC):
    """The loss of a head on a batch; hashable, as compiled programs are made for it.

    ``steps``: depths of a draft that it trains, the entries of its metrics.
    """

    steps: int

    @property
    @abc.abstractmethod
    def described(self) -> str:
        """What it unrolls, for a model card."""

    @abc.abstractmethod
    def check(self, head: Any) -> None:
        """Raise ValueError for a head that it does not train."""

    def drawn(self, batch: DraftBatch, random: np.random.Generator) -> DraftBatch:
        """A batch on the host [..., T] with the random choices that the loss makes: here none."""
        return batch

    @abc.abstractmethod
    def counts(self, batch: DraftBatch) -> Array:
        """Learned tokens of each depth, at least 1: float32 [steps]."""

    @abc.abstractmethod
    def __call__(
        self,
        head: Any,
        target: Decoder,
        batch: DraftBatch,
        attend: Attend = dense_causal_attend,
        counts: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Loss float32 [] of a head on a batch, and metrics float32 [steps].

        The target is not trained. The function is pure and may be differentiated. ``counts``
        [steps] divides each depth's sums; give those of the whole batch if this is a micro-batch of
        it. The default is this batch's.

        Metrics: ``loss``; ``accuracy``, how often the head's likeliest token is the target's;
        ``overlap``, the mean of sum(min(p, q)), which is the share accepted by rejection sampling
        at temperature 1. All are conditional on the earlier tokens of the draft being right.
        """


@dataclasses.dataclass(frozen=True)
class LossConfig(Loss):
    """The loss of EAGLE heads and MTP layers.

    Attributes:
      steps: unrolled steps of the head.
      step_decay: weight of a step's loss relative to the step before.
      hidden_weight: weight of the smooth-L1 distance to the target's next hidden state (EAGLE-1).
      token_weight: weight of the cross entropy to the target's distribution.
    """

    steps: int = 6
    step_decay: float = 0.8
    hidden_weight: float = 0.0
    token_weight: float = 1.0

    def __post_init__(self):
        if self.steps < 1 or not 0 < self.step_decay <= 1:
            raise ValueError("steps must be at least 1, and step_decay in (0, 1]")

    @classmethod
    def for_method(cls, method: str, steps: int | None = None) -> "LossConfig":
        """The paper's loss for a method. EAGLE-1 (arXiv 2401.15077) uses one step and also predicts
        hidden states; ``steps`` replaces the number of steps."""
        if method == "eagle1":
            return cls(steps=1 if steps is None else steps, hidden_weight=1.0, token_weight=0.1)
        return cls(steps=6 if steps is None else steps)

    @property
    def described(self) -> str:
        return f"{self.steps} unrolled steps"

    def check(self, head: Any) -> None:
        if not isinstance(head, DraftHead):
            raise ValueError("a LossConfig trains EAGLE heads and MTP layers")

    def counts(self, batch: DraftBatch) -> Array:
        counts = [jnp.sum(batch.learned[:, step + 1 :]) for step in range(1, self.steps + 1)]
        return jnp.maximum(jnp.stack(counts), 1).astype(jnp.float32)

    def __call__(
        self,
        head: DraftHead,
        target: Decoder,
        batch: DraftBatch,
        attend: Attend = dense_causal_attend,
        counts: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        features, hidden = target_states(target, batch, head.capture, attend)
        counts = self.counts(batch) if counts is None else counts
        unrolled = unroll(head, target, batch.tokens, features, self.steps)
        outputs, normed = zip(*unrolled, strict=True)
        total, metrics = jnp.float32(0), []
        for index, of_logits in enumerate(_of_logits(head, target, normed, hidden)):
            part = slice(index + 1, -1)
            learned = batch.learned[:, index + 2 :]  # what these entries predict
            values = tuple(x[:, part] for x in of_logits)
            differences = outputs[index][:, part], hidden[:, part]
            metrics.append(self._of_step(values, differences, learned, counts[index]))
            total += self.step_decay**index * metrics[-1]["loss"]
        return total, jax.tree.map(lambda *values: jnp.stack(values), *metrics)

    def _of_step(
        self,
        of_logits: tuple[Array, ...],
        states: tuple[Array, Array],
        learned: Array,
        count: Array,
    ) -> dict[str, Array]:
        """Loss and metrics of one step, from the results of _of_logits.

        States are the head's and the target's [B, T, H], learned is bool [B, T]; sums are divided
        by count, float32 [].
        """

        def mean(values: Array, where: Array) -> Array:
            return jnp.sum(jnp.where(where, values.astype(jnp.float32), 0)) / count

        cross_entropy, known, right, overlap = of_logits
        loss = self.token_weight * mean(cross_entropy, learned & known)
        if self.hidden_weight:
            outputs, hidden = (x.astype(jnp.float32) for x in states)
            smooth = optax.huber_loss(outputs, hidden)
            loss += self.hidden_weight * mean(smooth.mean(axis=-1), learned)
        accuracy, overlap = mean(right, learned), mean(overlap, learned)
        return {"loss": loss, "accuracy": accuracy, "overlap": overlap}


def target_states(
    target: Decoder, batch: DraftBatch, capture: tuple[int, ...], attend: Attend
) -> tuple[Array, Array]:
    """(features [B, T, C], hidden after the final norm [B, T, H]) of a batch; no gradient."""
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    hidden, _, features = decoder.run(
        target, batch.tokens, positions, target.no_states(), attend, capture
    )
    assert features is not None
    return jax.lax.stop_gradient(features), jax.lax.stop_gradient(hidden)


def check_unrolled(model: ModelConfig) -> None:
    """Raise ValueError for layers that ``attend_unrolled`` does not attend for."""
    for layer in model.layers:
        if not isinstance(layer.mixer, AttentionConfig):
            raise ValueError(
                "heads with latent attention cannot be trained yet: draft with the checkpoint's "
                "own layers, or take a model with other attention"
            )


def attend_unrolled(cache: StepKeys, heads: Heads, window: int | None) -> tuple[Array, StepKeys]:
    """An ``Attend`` function over the keys of all steps so far; ``heads`` are the current step's.

    Slot 0 is never read, as in serving: token 0 has no hidden state before it.
    """
    q, k, v = heads.rotated()
    scale = q.shape[-1] ** -0.5 if heads.scale is None else heads.scale
    steps = (*cache, (k, v))
    late = len(steps) - 1  # step 1's visible entries end this many positions before the query
    batch, length, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, -1, head_dim)
    position = jnp.arange(length)
    behind = position[:, None] - position  # [T, S]
    visible = (behind >= late) & (position >= 1)
    if window is not None:
        visible &= behind < window
    first_k, first_v = steps[0]
    scores = capped(einsum_f32("btgrd,bsgd->bgrts", grouped, first_k) * scale, heads.softcap)
    scores = [jnp.where(visible, scores, MASKED)]
    for index, (step_k, _) in enumerate(steps[1:], start=1):
        step_key = _shifted(step_k, late - index)
        score = capped(einsum_f32("btgrd,btgd->bgrt", grouped, step_key) * scale, heads.softcap)
        scores.append(score[..., None])
    if heads.sinks is not None:  # as a last slot, of which no value is added
        sinks = heads.sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        scores.append(jnp.broadcast_to(sinks, (*scores[0].shape[:-1], 1)))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v.dtype)
    out = einsum_f32("bgrts,bsgd->btgrd", weights[..., :length], first_v)
    for index, (_, step_v) in enumerate(steps[1:], start=1):
        weight = weights[..., length + index - 1]
        out += einsum_f32("bgrt,btgd->btgrd", weight, _shifted(step_v, late - index))
    return out.astype(q.dtype).reshape(q.shape), steps


def _shifted(x: Array, distance: int) -> Array:
    """x [B, T, ...] moved ``distance`` positions later; the first ones become zero."""
    padding = [(0, 0), (distance, 0)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, : x.shape[1] - distance], padding)


def unroll(
    head: DraftHead, target: Decoder, tokens: Array, features: Array, steps: int
) -> list[tuple[Array, Array]]:
    """Outputs [B, T, H] of each step, and the same after the norm before the LM head.

    Entry ``i`` reads the embedding of token ``i`` and the hidden state of token ``i - 1``, and
    predicts token ``i + 1``. The outputs of step ``s`` are valid from position ``s`` on.

    Args: tokens [B, T], features [B, T, C].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]) - 1, tokens.shape)
    states: tuple[Any, ...] = ((),) * len(head.layers)
    hidden, outputs = head.hidden(features), []
    for _ in range(steps):
        hidden, normed, states = head.run(
            target, tokens, _shifted(hidden, 1), positions, states, attend_unrolled
        )
        outputs.append((hidden, normed))
    return outputs


@jax.checkpoint
def _of_logits(
    head: DraftHead, target: Decoder, normed: Sequence[Array], hidden: Array
) -> list[tuple[Array, ...]]:
    """(cross entropy, in the draft vocabulary, right, overlap), each [B, T], of each step.

    The target's probabilities are renormalized over the draft vocabulary. Positions whose
    likeliest token is outside it are skipped. The target's logits are computed once for all steps.
    The backward pass recomputes this function, as the logits would not fit in memory.

    Args: normed states of the head, each [B, T, H], and the target's hidden states [B, T, H].
    """
    wanted = decoder.logits(target, hidden)
    best, total = jnp.argmax(wanted, axis=-1), jax.nn.logsumexp(wanted, axis=-1)
    ids, known = head.token_ids, jnp.ones(best.shape, bool)
    if ids is not None:
        known = jnp.zeros(wanted.shape[-1], bool).at[ids].set(True)[best]
        wanted = wanted[..., ids]

    @jax.checkpoint  # one step's logits at a time
    def of_step(normed: Array) -> tuple[Array, ...]:
        drafted = head.logits(target, normed)
        log_q = jax.nn.log_softmax(drafted)
        cross_entropy = -jnp.sum(jax.nn.softmax(wanted) * log_q, axis=-1)
        choice = jnp.argmax(drafted, axis=-1)
        right = (choice if ids is None else ids[choice]) == best
        overlap = jnp.minimum(jnp.exp(wanted - total[..., None]), jnp.exp(log_q)).sum(axis=-1)
        return cross_entropy, known, right, overlap

    return [of_step(x) for x in normed]
