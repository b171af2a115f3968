"""The loss of a block head at many places of each row at once.

A block is what the drafter runs: a committed token, the *anchor*, and masks. Its context is what
the head makes of the target's hidden states at the tokens before the anchor, and its tokens attend
to that context and to each other, as when the head drafts. The context is computed once for a row;
a mask gives each block its part. The layers are the same as in serving; only the attention function
differs.

The output of depth ``d`` drafts the token ``d`` places after the anchor, on condition that the
tokens between are the row's: DSpark's Markov head reads them from the row. Heads that choose among
candidates (DFlash 2, LiLiCorr) have a loss with more terms, in candidate_loss.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.attention_heads import Heads
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend
from jaxspec.models.heads import BlockHead
from jaxspec.models.heads.block_context import Causality, is_causal
from jaxspec.models.heads.corrections import Markov
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from jaxspec.training.heads.loss import DraftBatch, Loss, target_states
from pallas_kernels.paged_attention.reference import MASKED
from pallas_kernels.products import einsum_f32

KEPT = "kept"


class Blocks(NamedTuple):
    """What a head and its target have computed at the places of A blocks of T drafted tokens.

    Attributes:
      outputs: [B, A, T, H] the head's normed outputs.
      wanted: [B, A, T, H] the target's normed hidden states.
      before: int32 [B, A, T] tokens before the drafted ones; the first are the anchors.
      context: [B, A, H] what the head's layers read of the token before the anchor; zeros where
        there is none.
    """

    outputs: Array
    wanted: Array
    before: Array
    context: Array

    def each_depth[T](self, run: Callable[[Array, Array, Array], T]) -> T:
        """``run`` of the outputs, hidden states and tokens of each depth, [T, ...]: one depth after
        the other, as the logits of all would not fit in memory. For gradients all but what has the
        name KEPT is computed again."""
        by_depth = tuple(jnp.moveaxis(x, 2, 0) for x in (self.outputs, self.wanted, self.before))
        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        return jax.lax.map(lambda x: jax.checkpoint(run, policy=policy)(*x), by_depth)


@dataclasses.dataclass(frozen=True)
class BlockLoss(Loss):
    """Terms of the loss, and how many blocks of a row it is computed for.

    Attributes:
      steps: drafted tokens of a block.
      anchors: blocks of a row, at random places; another choice in each step.
      fade: depths after which a token's weight has fallen to 1 / e.
      token_weight: weight of the cross entropy to the target's distribution.
      distance_weight: weight of the L1 distance to the target's distribution, which is twice the
        share that rejection sampling refuses at temperature 1.
      confidence_weight: weight of the confidence head's cross entropy to the share it accepts.
    """

    steps: int
    anchors: int = 64
    fade: float = 4.0
    token_weight: float = 1.0
    distance_weight: float = 0.0
    confidence_weight: float = 0.0

    def __post_init__(self):
        if self.steps < 1 or self.anchors < 1 or self.fade <= 0:
            raise ValueError("a block drafts at least one token, at one or more places of a row")

    @property
    def described(self) -> str:
        return f"blocks of {self.steps} drafted tokens at up to {self.anchors} places of a row"

    def check(self, head: Any) -> None:
        if not isinstance(head, BlockHead) or head.max_depth != self.steps:
            raise ValueError(f"this BlockLoss trains block heads that draft {self.steps} tokens")
        self.check_correction(head)
        if head.lm_head is not None or any(layer.attention.sinks for layer in head.config.layers):
            raise ValueError("block heads with a reduced vocabulary or with sinks are not trained")
        if (head.confidence is not None) != (self.confidence_weight > 0):
            raise ValueError("a confidence head is trained by a loss that has a weight for it")

    def check_correction(self, head: BlockHead) -> None:
        """Raise ValueError for a correction that this loss does not train."""
        if head.correction is not None and type(head.correction) is not Markov:
            raise ValueError("of corrections, this loss trains a plain Markov head alone")

    def drawn(self, batch: DraftBatch, random: np.random.Generator) -> DraftBatch:
        """A batch on the host [..., T] with anchors before learned tokens [..., A]; -1 where a row
        has too few."""
        learned = np.asarray(batch.learned)[..., 1:]
        order = np.where(learned, random.random(learned.shape), 2.0)
        anchors = np.argsort(order, axis=-1)[..., : self.anchors]
        valid = np.take_along_axis(learned, anchors, axis=-1)
        chosen: Any = np.where(valid, anchors, -1).astype(np.int32)
        return batch.replace(anchors=chosen)

    def counts(self, batch: DraftBatch) -> Array:
        learned = _learned(batch, self.steps)
        return jnp.maximum(learned.sum(axis=(0, 1)), 1).astype(jnp.float32)

    def __call__(
        self,
        head: BlockHead,
        target: Decoder,
        batch: DraftBatch,
        attend: Attend = dense_causal_attend,
        counts: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """See Loss; of a batch with anchors. A confidence head has two more metrics:
        ``confidence``, its mean, which would be ``overlap`` if it were right, and
        ``confidence_error``, the mean distance."""
        features, hidden = target_states(target, batch, head.capture, attend)
        counts = self.counts(batch) if counts is None else counts
        values = self.values(
            head, target, blocks_of(head, target, batch, features, hidden, self.steps)
        )
        learned = jnp.moveaxis(_learned(batch, self.steps), 2, 0)
        metrics = {
            name: jnp.where(learned, x, 0).sum(axis=(1, 2)) / counts for name, x in values.items()
        }
        weights = counts * jnp.exp(-jnp.arange(self.steps) / self.fade)
        return (weights * metrics["loss"]).sum() / weights.sum(), metrics

    def values(self, head: BlockHead, target: Decoder, blocks: Blocks) -> dict[str, Array]:
        """Loss and metrics [T, B, A] of each drafted token."""
        return blocks.each_depth(lambda *x: self._of_logits(head, target, *x))

    def _of_logits(
        self, head: BlockHead, target: Decoder, outputs: Array, wanted: Array, before: Array
    ) -> dict[str, Array]:
        """Loss and metrics [B, A] of one depth.

        Args: the head's outputs and the target's hidden states [B, A, H], and the tokens before the
        drafted ones [B, A].
        """
        drafted, target_logits = head.logits(target, outputs), decoder.logits(target, wanted)
        if head.markov is not None:
            drafted += head.markov.bias(target, before)
        p, log_q = jax.nn.softmax(target_logits), jax.nn.log_softmax(drafted)
        overlap = jnp.minimum(p, jnp.exp(log_q)).sum(axis=-1)
        loss = -self.token_weight * (p * log_q).sum(axis=-1)
        if self.distance_weight:
            loss += self.distance_weight * 2 * (1 - overlap)
        right = jnp.argmax(drafted, axis=-1) == jnp.argmax(target_logits, axis=-1)
        metrics = {"accuracy": right.astype(jnp.float32), "overlap": overlap}
        if head.confidence is not None:
            logits = head.confidence(outputs, head.markov, before)
            accepted = jax.lax.stop_gradient(overlap)
            entropy = jax.nn.softplus(logits) - accepted * logits
            loss += self.confidence_weight * entropy
            share = jax.nn.sigmoid(logits)
            metrics |= {"confidence": share, "confidence_error": jnp.abs(share - overlap)}
        return {"loss": loss} | metrics


def block_outputs(
    head: BlockHead, target: Decoder, batch: DraftBatch, features: Array, steps: int
) -> Array:
    """Normed outputs of the blocks at a batch's anchors: [B, A, steps, H]; features [B, T, C]."""
    tokens, anchors = batch.tokens, _anchors(batch)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    nothing = ((),) * len(head.layers)
    context = head.read_context(head.fused(features), positions, nothing, keep_keys)
    roots = jnp.take_along_axis(tokens, anchors, axis=1)
    block = head.block(roots.reshape(-1), steps)  # [B * A, T]
    positions = anchors.reshape(-1, 1) + jnp.arange(block.shape[1])
    attend = AnchoredAttend(anchors=anchors, causal=head.causal)
    outputs, _ = head.outputs(target, block, positions, context, attend)
    return outputs.reshape(*anchors.shape, steps, -1)


def blocks_of(
    head: BlockHead,
    target: Decoder,
    batch: DraftBatch,
    features: Array,  # [B, T, C]
    hidden: Array,  # [B, T, H] of the target
    steps: int,
) -> Blocks:
    """The blocks at a batch's anchors."""
    outputs, places = block_outputs(head, target, batch, features, steps), _places(batch, steps)
    flat = places.reshape(len(places), -1)
    wanted = jnp.take_along_axis(hidden, flat[..., None], axis=1).reshape(outputs.shape)
    before = jnp.take_along_axis(batch.tokens, flat, axis=1).reshape(places.shape)
    last = _anchors(batch)[..., None] - 1
    context = jnp.take_along_axis(head.fused(features), jnp.maximum(last, 0), axis=1)
    return Blocks(outputs, wanted, before, jnp.where(last < 0, 0, context))


def keep_keys(
    state: tuple[()], heads: Heads, window: int | None
) -> tuple[Array, tuple[Array, Array]]:
    """An ``Attend`` function that keeps keys and values [B, S, G, D], and attends to nothing."""
    q, k, v = heads.rotated()
    return q, (k, v)


@pytree
class AnchoredAttend(Pytree):
    """An ``Attend`` function for blocks [B * A, T]: each attends to itself and to the context
    before its anchor, of the keys and values that ``keep_keys`` kept of its row. ``causal``: see
    BlockConfig."""

    anchors: Array = array("batch", "alternatives")  # int32 [B, A]
    causal: Causality = static()

    def __call__(
        self, state: tuple[Array, Array], heads: Heads, window: int | None
    ) -> tuple[Array, tuple[Array, Array]]:
        q, k, v = heads.rotated()
        scale = q.shape[-1] ** -0.5 if heads.scale is None else heads.scale
        rows = self.anchors.shape
        by_row = (x.reshape(*rows, *x.shape[1:]) for x in (q * scale, k, v))
        causal = is_causal(self.causal, window)
        seen = _seen(self.anchors, state[0].shape[1], q.shape[1], window, causal)
        return _anchored_attention(*by_row, *state, seen).reshape(q.shape), state


def _seen(anchors: Array, size: int, tokens: int, window: int | None, causal: bool) -> Array:
    """What each token of a block sees, of its row's context [S] and then of its block [T]: bool
    [B, A, T, S + T]."""
    offsets = jnp.arange(tokens)
    context = jnp.arange(size) - anchors[..., None]  # [B, A, S], from the anchor on
    block = jnp.broadcast_to(offsets, (*anchors.shape, tokens))
    slots = jnp.concatenate([context, block], axis=-1)[..., None, :]
    is_block = jnp.arange(size + tokens) >= size
    seen = is_block | (slots < 0)
    if causal:
        seen &= slots <= offsets[:, None]
    if window is not None:
        seen &= offsets[:, None] - slots < window
    return jnp.broadcast_to(seen, (*anchors.shape, tokens, size + tokens))


@jax.checkpoint  # the scores of all layers would not fit in memory
def _anchored_attention(
    q: Array,  # [B, A, T, Q, D], scaled
    k: Array,  # [B, A, T, G, D]
    v: Array,  # [B, A, T, G, D]
    context_k: Array,  # [B, S, G, D]
    context_v: Array,  # [B, S, G, D]
    seen: Array,  # bool [B, A, T, S + T]
) -> Array:
    """[B, A, T, Q, D]"""
    size = context_k.shape[1]
    grouped = q.reshape(*k.shape[:4], -1, k.shape[-1])  # [B, A, T, G, R, D]
    context = einsum_f32("batgrd,bsgd->bgrats", grouped, context_k)
    within = einsum_f32("batgrd,baugd->bgratu", grouped, k)
    scores = jnp.concatenate([context, within], axis=-1)
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = einsum_f32("bgrats,bsgd->batgrd", weights[..., :size], context_v)
    out += einsum_f32("bgratu,baugd->batgrd", weights[..., size:], v)
    return out.astype(q.dtype).reshape(q.shape)


def _anchors(batch: DraftBatch) -> Array:
    """Anchors [B, A], with 0 for those that a row lacks."""
    assert batch.anchors is not None, "BlockLoss.drawn chooses them"
    return jnp.maximum(batch.anchors, 0)


def _places(batch: DraftBatch, steps: int) -> Array:
    """Positions of the tokens before the drafted ones: [B, A, steps], within the row."""
    places = _anchors(batch)[..., None] + jnp.arange(steps)
    return jnp.minimum(places, batch.tokens.shape[1] - 1)


def _learned(batch: DraftBatch, steps: int) -> Array:
    """Which drafted tokens are learned: bool [B, A, steps]. After one that is not, none is: the
    text that the target writes has ended."""
    assert batch.anchors is not None
    after = jnp.pad(batch.learned[:, 1:], ((0, 0), (0, 1)))  # of the token after each place
    flat = _places(batch, steps).reshape(len(after), -1)
    marked = jnp.take_along_axis(after, flat, axis=1).reshape(*batch.anchors.shape, steps)
    marked &= (batch.anchors >= 0)[..., None]
    return jnp.cumprod(marked, axis=-1, dtype=jnp.int32) > 0
