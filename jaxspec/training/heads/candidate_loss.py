"""The loss of block heads that choose among candidates of each depth: DFlash 2 and LiLiCorr.

The candidates are those of drafting: the likeliest tokens by the head's LM head. Their scores are
those behind the row's token before. Where that token is no candidate of its depth, no draft gets
there, and the candidates' log-probabilities stand in the place of scores.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead
from jaxspec.models.heads.corrections import Lattice, PairCorrection, PairScores
from jaxspec.training.heads.block_loss import KEPT, BlockLoss, Blocks
from pallas_kernels.top_k.reference import local_top_k

BlockMethod = Literal["dflash", "dspark", "dflash2", "lilicorr"]


@dataclasses.dataclass(frozen=True)
class CandidateLoss(BlockLoss):
    """A BlockLoss, whose terms are of the LM head's logits, with terms of the chosen candidate.

    Attributes:
      candidate_weight: weight of the cross entropy of the choice to the target's distribution, as
        much of that as is on candidates.
      regret_weight: weight of what the choice loses, on average, in the target's log-probability
        against the target's likeliest token.
    """

    candidate_weight: float = 1.0
    regret_weight: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.distance_weight or self.confidence_weight:
            raise ValueError("a CandidateLoss has no terms of distance and confidence")

    def check_correction(self, head: BlockHead) -> None:
        if not isinstance(head.correction, PairCorrection):
            raise ValueError("this loss trains block heads that choose among candidates alone")

    def values(self, head: BlockHead, target: Decoder, blocks: Blocks) -> dict[str, Array]:
        """See BlockLoss. ``accuracy`` and ``overlap`` are those of the choice."""
        correction: Any = head.correction
        known = known_candidates(head, target, blocks, correction.candidates)
        # Of all depths at once, so that what layers over candidates keep would be much.
        scores = jax.checkpoint(forced_scores)(correction, target, blocks, known)
        log_q, p = jax.nn.log_softmax(scores), jnp.exp(known.wanted)
        q, chosen = jnp.exp(log_q), jnp.argmax(scores, axis=-1, keepdims=True)
        loss = self.token_weight * known.entropy
        loss -= self.candidate_weight * (p * log_q).sum(axis=-1)
        if self.regret_weight:
            lost = known.best[..., None] - known.wanted
            loss += self.regret_weight * (q * lost).sum(axis=-1)
        right = jnp.take_along_axis(known.tokens, chosen, axis=-1)[..., 0] == known.likeliest
        overlap = jnp.minimum(p, q).sum(axis=-1)
        return {"loss": loss, "accuracy": right.astype(jnp.float32), "overlap": overlap}


class Known(NamedTuple):
    """Candidates of drafted tokens, and what is known of these without a choice among them.

    Attributes:
      tokens: int32 [T, B, A, K], the likeliest first.
      log_probs, wanted: [T, B, A, K] what the LM head and the target say of them.
      best, likeliest: [T, B, A] log-probability and id of the target's likeliest token.
      entropy: [T, B, A] cross entropy of the LM head's logits to the target's distribution.
    """

    tokens: Array
    log_probs: Array
    wanted: Array
    best: Array
    likeliest: Array
    entropy: Array


def known_candidates(head: BlockHead, target: Decoder, blocks: Blocks, count: int) -> Known:
    """The candidates of all blocks, ``count`` of each depth."""

    def of_depth(outputs: Array, wanted: Array, before: Array) -> Known:
        log_q = jax.nn.log_softmax(head.logits(target, outputs))  # [B, A, V]
        log_p = jax.nn.log_softmax(decoder.logits(target, wanted))
        _, tokens = local_top_k(jax.lax.stop_gradient(log_q), count)
        tokens = checkpoint_name(tokens, KEPT)
        log_probs, known = (jnp.take_along_axis(x, tokens, axis=-1) for x in (log_q, log_p))
        entropy = -(jnp.exp(log_p) * log_q).sum(axis=-1)
        best, likeliest = log_p.max(axis=-1), jnp.argmax(log_p, axis=-1)
        return Known(tokens, log_probs, known, best, likeliest, entropy)

    return blocks.each_depth(of_depth)


def forced_scores(
    correction: PairCorrection, target: Decoder, blocks: Blocks, known: Known
) -> Array:
    """Scores of the candidates behind the row's tokens: [T, B, A, K]."""

    def flat(x: Array, axis: int = 0) -> Array:
        """[..., B, A, ...] -> [..., B * A, ...]"""
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    tokens, log_probs = (jnp.moveaxis(flat(x, 1), 0, 1) for x in (known.tokens, known.log_probs))
    lattice = Lattice(flat(blocks.outputs), tokens, log_probs, flat(blocks.context))
    before = flat(blocks.before)
    scores = behind(correction.scores(target, lattice, before[:, 0]), before, log_probs)
    return jnp.moveaxis(scores, 1, 0).reshape(known.tokens.shape)


def behind(scores: PairScores, before: Array, otherwise: Array) -> Array:
    """Scores [N, T, K] of the candidates of each depth behind the tokens ``before``, int32 [N, T],
    the first of which are the roots. Behind one that is no candidate of its depth: those of
    ``otherwise`` [N, T, K]."""
    same = scores.tokens[:, :-1] == before[:, 1:, None]  # [N, T - 1, K]
    place = jnp.argmax(same, axis=-1)[..., None, None]
    later = jnp.take_along_axis(scores.pairs, place, axis=2)[:, :, 0]
    later = jnp.where(same.any(axis=-1, keepdims=True), later, otherwise[:, 1:])
    return jnp.concatenate([scores.first[:, None], later], axis=1)


def block_loss_for(method: BlockMethod, steps: int, anchors: int = 64) -> BlockLoss:
    """The loss of a method's published recipe. Where those take the row's own token, or the
    target's likeliest, all of these have the target's distribution.

    DFlash and DSpark: deepseek-ai/DeepSpec. DFlash 2: the speculators library. LiLiCorr:
    NVIDIA's Model-Optimizer, its base variant.
    """
    match method:
        case "dflash":
            return BlockLoss(steps, anchors)
        case "dspark":
            return BlockLoss(
                steps, anchors, token_weight=0.1, distance_weight=0.9, confidence_weight=1.0
            )
        case "dflash2":
            return CandidateLoss(steps, anchors, candidate_weight=1.0)
        case "lilicorr":
            return CandidateLoss(steps, anchors, candidate_weight=0.25, regret_weight=0.25)
