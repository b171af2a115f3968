"""GRPO: a policy moves towards what was better than the other samples of its prompt.

Source: DeepSeekMath, arXiv:2402.03300. Here a batch is learned once, so the ratio of the new policy
to the one that sampled is 1 and nothing is clipped; there is no KL term.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxspec.decoding.token_logprobs import token_logprobs
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import Pytree, array, pytree

SMALLEST_DEVIATION = 1e-4  # of a group's rewards


@pytree
class RolloutBatch(Pytree):
    """B samples of at most S tokens: prompts, then what the policy wrote."""

    tokens: Array = array("batch", "length")  # int32 [B, S], padded on the right
    lengths: Array = array("batch")  # int32 [B]
    written: Array = array("batch", "length")  # bool [B, S]: what the policy wrote
    advantages: Array = array("batch")  # float32 [B]


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """How much better a sample is than the others of its prompt, in their standard deviations.

    Args:
      rewards: [P, G], of G samples of each prompt.

    Returns float32 [P, G]; 0 where all samples of a prompt have the same reward.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = rewards.std(axis=1, keepdims=True)
    return (centred / (deviation + SMALLEST_DEVIATION)).astype(np.float32)


def rollout_batch(
    prompts: Sequence[Sequence[int]],
    written: Sequence[Sequence[int]],
    advantages: np.ndarray,
    length: int,
) -> RolloutBatch:
    """Samples as arrays of one ``length``, so that the step that learns them is compiled once.

    Raises ValueError for a sample that is longer.
    """
    tokens = np.zeros((len(prompts), length), np.int32)
    lengths, mask = np.zeros(len(prompts), np.int32), np.zeros(tokens.shape, bool)
    for row, (prompt, answer) in enumerate(zip(prompts, written, strict=True)):
        ids = [*prompt, *answer]
        if len(ids) > length:
            raise ValueError(f"a sample of {len(ids)} tokens does not fit {length}")
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        mask[row, len(prompt) : len(ids)] = True
    arrays = {"tokens": tokens, "lengths": lengths, "written": mask}
    arrays |= {"advantages": advantages.reshape(-1).astype(np.float32)}
    return RolloutBatch(**jax.device_put(arrays))


def grpo_loss(
    target: Decoder, batch: RolloutBatch, temperature: float = 1.0
) -> tuple[Array, Array]:
    """The loss, a mean over all tokens written, and their log-probabilities, float32 [B, S], of
    the policy that samples with this temperature."""
    logprobs = token_logprobs(
        target, batch.tokens, batch.lengths, temperature=temperature, remat=True
    )
    gain = jnp.where(batch.written, logprobs * batch.advantages[:, None], 0.0)
    return -gain.sum() / jnp.maximum(batch.written.sum(), 1), logprobs


@functools.partial(jax.jit, static_argnames="temperature")
def policy_gradient(target: Decoder, batch: RolloutBatch, temperature: float = 1.0) -> Decoder:
    """The gradient of the loss."""
    return jax.grad(grpo_loss, has_aux=True)(target, batch, temperature)[0]


def grpo_step(
    optimizer: optax.GradientTransformation,
    temperature: float,
    target: Decoder,
    state: Any,
    batch: RolloutBatch,
) -> tuple[Decoder, Any, Array]:
    """The policy and the optimizer's state after a step, and the log-probabilities before it."""
    gradient, logprobs = jax.grad(grpo_loss, has_aux=True)(target, batch, temperature)
    weights: Any = target  # a pytree, which optax's annotations do not know
    updates, state = optimizer.update(gradient, state, weights)
    new: Any = optax.apply_updates(weights, updates)
    return new, state, logprobs


def kl_per_token(
    target: Decoder, batch: RolloutBatch, before: Array, temperature: float = 1.0
) -> Array:
    """How far a policy has moved from the one that wrote a batch: float32 [].

    The mean over its tokens of r - 1 - log r, with r the ratio of the new probability to the old
    one: an estimate of KL(old, new) that is never negative.

    Args:
      before: float32 [B, S], log-probabilities under the policy that wrote it.
    """
    now = token_logprobs(target, batch.tokens, batch.lengths, temperature=temperature)
    change = jnp.where(batch.written, now - before, 0.0)
    terms = jnp.expm1(change) - change
    return terms.sum() / jnp.maximum(batch.written.sum(), 1)
