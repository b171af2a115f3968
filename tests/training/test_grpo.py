"""GRPO, by values computed by hand and by plain formulas."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.decoder import Decoder
from jaxspec.training.grpo import group_advantages, grpo_loss, kl_per_token, rollout_batch
from jaxspec.training.policy import Policy
from jaxspec.training.precision import cast_weights
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_target, tiny_config
from tests.helpers.sampling_reference import plain_logits as jit_plain_logits

plain_logits = inspect.unwrap(jit_plain_logits)  # within other programs
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
TARGET = random_target(tiny_config(num_layers=1))
PROMPTS = [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
WRITTEN = [[1, 2, 3], [4], [10, 11], [12, 13, 14]]
REWARDS = np.array([[1.0, 0.0], [0.0, 1.0]])
BATCH = rollout_batch(PROMPTS, WRITTEN, group_advantages(REWARDS), length=8)


def of_written() -> np.ndarray:
    """Which entries [4, 7] of log-probabilities of the second and later tokens are written ones."""
    return np.array(
        [
            [0, 1, 1, 1, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0],
        ]
    )


def dtypes(weights: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(weights)]


def plain_logprobs(target: Decoder) -> jax.Array:
    """Of the second and later tokens of the batch: [4, 7]."""
    logits = jax.nn.log_softmax(plain_logits(target, BATCH.tokens)[:, :-1])
    return jnp.take_along_axis(logits, BATCH.tokens[:, 1:, None], 2)[..., 0]


def plain_loss(target: Decoder) -> tuple[jax.Array, jax.Array]:
    """And the log-probabilities."""
    advantages = jnp.array([1.0, -1.0, -1.0, 1.0]) * 0.5 / 0.5001
    logprobs = plain_logprobs(target)
    return -(logprobs * advantages[:, None] * of_written()).sum() / 9, logprobs


def test_advantages_are_deviations_within_a_group():
    found = group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0], [2.0] * 4]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], [1, -1, -1, 1], rtol=3e-4)
    np.testing.assert_allclose(found[1], [3**0.5, *[-(3**-0.5)] * 3], rtol=3e-4)
    np.testing.assert_array_equal(found[2], 0)


def test_a_batch_has_prompts_and_what_was_written():
    assert BATCH.tokens.dtype == BATCH.lengths.dtype == jnp.int32
    assert BATCH.tokens.tolist()[0] == [5, 6, 1, 2, 3, 0, 0, 0]
    assert BATCH.lengths.tolist() == [5, 3, 5, 6]
    np.testing.assert_array_equal(BATCH.written[:, 1:], of_written() > 0)
    assert not BATCH.written[:, 0].any()
    np.testing.assert_allclose(BATCH.advantages, [1, -1, -1, 1], rtol=3e-4)


def test_a_longer_sample_is_refused():
    with pytest.raises(ValueError, match="a sample of 6 tokens does not fit 5"):
        rollout_batch(PROMPTS, WRITTEN, REWARDS, length=5)


def test_the_gradient_is_that_of_the_plain_formula():
    losses = (jax.value_and_grad(loss, has_aux=True) for loss in (grpo_loss, plain_loss))
    of_batch, plain = map(jit, losses)
    (loss, logprobs), found = jax.device_get(of_batch(TARGET, BATCH))
    (expected_loss, expected_logprobs), expected = jax.device_get(plain(TARGET))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(
        logprobs[:, 1:] * of_written(), expected_logprobs * of_written(), atol=2e-5
    )
    gradients, references = map(jax.tree.leaves, (found, expected))
    for gradient, reference in zip(gradients, references, strict=True):
        assert np.linalg.norm(gradient - reference) <= 1e-5 * np.linalg.norm(reference)
    assert any(np.linalg.norm(reference) > 1e-3 for reference in references)


def test_a_temperature_is_that_of_the_samples():
    """A loss, and how far a policy moved, are of the policy that samples so."""
    loss, logprobs = jax.device_get(jit(grpo_loss)(TARGET, BATCH, 0.5))
    logits = np.asarray(jit_plain_logits(TARGET, BATCH.tokens))[:, :-1] / 0.5
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(logits, np.asarray(BATCH.tokens)[:, 1:, None], 2)[..., 0]
    mask = of_written()
    np.testing.assert_allclose(logprobs[:, 1:] * mask, expected * mask, atol=5e-5)
    total = (expected * np.asarray(BATCH.advantages)[:, None] * mask).sum()
    np.testing.assert_allclose(loss, -total / mask.sum(), rtol=1e-4)
    kl = jit(kl_per_token)
    assert kl(TARGET, BATCH, logprobs, 0.5) < 1e-9 < kl(TARGET, BATCH, logprobs, 1.0)


def test_a_policy_learns_what_was_rewarded():
    """And it says how far it moved, and serves weights of the target's dtypes."""
    target = cast_weights(TARGET, jnp.bfloat16)
    policy = Policy(target, learning_rate=1e-3, length=8)
    kl = jit(kl_per_token)
    before = jax.tree.map(np.array, policy.weights)  # a step donates them
    scorer = jit(plain_logprobs)
    first = np.asarray(scorer(before))
    served = policy.served
    moved = policy.learn(PROMPTS, WRITTEN, REWARDS)

    later = np.asarray(scorer(policy.weights))
    change = ((later - first) * of_written()).sum(axis=1)
    assert (np.sign(change) == [1, -1, -1, 1]).all()
    assert moved > 0
    scores = np.pad(first, ((0, 0), (1, 0)))
    assert abs(kl(before, BATCH, scores)) < 1e-9
    ratios = (later - first)[of_written() > 0]
    by_hand = np.mean(np.exp(np.float64(ratios)) - 1 - np.float64(ratios))
    np.testing.assert_allclose([moved, kl(policy.weights, BATCH, scores)], by_hand, rtol=1e-2)

    assert policy.served is policy.served and policy.served is not served
    for weights, like in ((policy.served, target), (served, target)):
        assert dtypes(weights) == dtypes(like)
    assert jnp.bfloat16 in dtypes(target) and jnp.bfloat16 not in dtypes(policy.weights)
    np.testing.assert_array_equal(served.embed, target.embed)  # no step donates what is served
    assert (np.asarray(policy.served.embed) != np.asarray(target.embed)).any()
