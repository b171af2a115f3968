"""The loss of block heads: what a head sees in training is what it sees when it drafts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.decoding.drafters.block import block_attend
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.heads import BlockHead
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.block_loss import BlockLoss, block_outputs
from jaxspec.training.heads.candidate_loss import block_loss_for
from jaxspec.training.heads.loss import DraftBatch, Loss, LossConfig, target_states
from jaxspec.training.heads.step import DraftTrainConfig, init_head
from tests.helpers.block_heads import block_target, random_head
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_decode,
    random_prompts,
    read_prompts,
    tiny_config,
)

TARGET = block_target(tiny_config(num_layers=3))
LENGTH = 14
TOKENS = np.random.default_rng(0).integers(TARGET.config.vocab_size, size=(2, LENGTH))
ANCHORS = [[3, 12, 0], [7, -1, 1]]
# The head of DSpark is that of DFlash with more parts.
EACH_KIND = pytest.mark.parametrize("kind", ["dspark", slow("dflash")])


def head_of(kind: str) -> BlockHead:
    return random_head(TARGET.config, kind, capture=(0, 2), confidence=kind == "dspark")


def loss_of(kind: str, **changes: Any) -> BlockLoss:
    loss = block_loss_for(kind, 5, 3)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(loss, **changes)


def batch_of(learned: np.ndarray | None = None, anchors: Any = ANCHORS) -> DraftBatch:
    marks = np.ones(TOKENS.shape, bool) if learned is None else learned
    return DraftBatch(
        tokens=jnp.asarray(TOKENS, jnp.int32),
        learned=jnp.asarray(marks),
        anchors=jnp.asarray(anchors, jnp.int32),
    )


@jax.jit
def jit_states(head: BlockHead, batch: DraftBatch) -> tuple[jax.Array, jax.Array]:
    return target_states(TARGET, batch, head.capture, dense_causal_attend)


jit_outputs = jax.jit(block_outputs, static_argnums=4, compiler_options=FAST_COMPILE)


@jax.jit
def block_logits(head: BlockHead, batch: DraftBatch) -> jax.Array:
    """Logits of training [B, A, 5, V], before the Markov head's."""
    features, _ = target_states(TARGET, batch, head.capture, dense_causal_attend)
    return decoder.logits(TARGET, block_outputs(head, TARGET, batch, features, 5))


@pytest.mark.parametrize(
    ("kind", "page_size", "calls"),
    [
        ("dspark", 7, (0,)),
        *(slow("dspark", 7, (5,)), slow("dflash", 7, (0, 5)), slow("dflash", 1, (0, 5))),
        slow("windowed", 7, (0, 5)),
    ],
)
def test_a_block_of_training_is_a_block_of_drafting(
    kind: str, page_size: int, calls: tuple[int, ...]
):
    """After prompts read in chunks and five rounds, on pages; all rows in one batch. Texts drafted
    after rounds: tests/decoding/test_block_exactness.py."""
    head = head_of(kind)
    drafter, depth = BlockDrafter(head=head), 5
    params = EngineParams(
        target=TARGET, drafter=drafter, speculation=SpeculationConfig.chain(depth)
    )
    state = admit_prompts(
        params, empty_state(params, 3, 64, page_size), random_prompts((5, 21, 30))
    )
    state = read_prompts(params, state, 5, greedy=True)
    for rounds in calls:
        if rounds:
            state, _ = jit_decode(params, state, rounds, max_rounds=5, shape=None, greedy=True)
        roots = np.asarray(state.rows.context_lens)  # places of the last committed tokens
        batch = DraftBatch(
            tokens=state.rows.tokens,
            learned=jnp.ones(state.rows.tokens.shape, bool),
            anchors=jnp.asarray(np.stack([roots // 2, roots], axis=1), jnp.int32),
        )
        trained = block_logits(head, batch)[:, 1]
        np.testing.assert_allclose(trained, served(params, state), rtol=0, atol=1e-4)


def served(params: EngineParams, state: EngineState) -> jax.Array:
    """Logits [R, 5, V] of the drafter's next block of each row, before the Markov head's."""

    @jax.jit
    def run(params: Any, state: EngineState) -> jax.Array:
        head = params.drafter.head
        state = functional.catch_up(params, state, jnp.arange(len(state.rows.status)))
        block = head.block(state.rows.roots, 5)
        attend = block_attend(state, block.shape[1], head.causal)
        states = state.pool.draft.layers
        outputs, _ = head.outputs(params.target, block, attend.positions, states, attend)
        return head.logits(params.target, outputs)

    return run(params, state)


def after_each(
    head: BlockHead, outputs: np.ndarray, hidden: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, ...]:
    """After each token ``before`` [D] the target's and the drafter's probabilities [D, V], and how
    sure the head is [D]; 0.5 without a confidence head."""

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(head: BlockHead, outputs: Any, hidden: Any, before: Any) -> tuple[jax.Array, ...]:
        drafted, sure = decoder.logits(TARGET, outputs), jnp.zeros(len(before))
        if head.markov is not None:
            drafted += head.markov.bias(TARGET, before)
        if head.confidence is not None:
            sure = head.confidence(outputs, head.markov, before)
        wanted = decoder.logits(TARGET, hidden)
        return jax.nn.softmax(wanted), jax.nn.softmax(drafted), jax.nn.sigmoid(sure)

    return jax.device_get(run(head, outputs, hidden, before))


@EACH_KIND
def test_loss_and_metrics_by_hand(kind: str):
    """Anchor 3 of row 0 learns tokens 4 to 6: token 7 is not learned, so 8 is not either."""
    head, loss = head_of(kind), loss_of(kind)
    learned = np.zeros(TOKENS.shape, bool)
    learned[0, [4, 5, 6, 8]] = True
    batch = batch_of(learned, [[3], [-1]])
    total, metrics = jax.device_get(jax.jit(loss)(head, TARGET, batch))
    assert loss.counts(batch).tolist() == [1, 1, 1, 1, 1]  # at least one, to divide by
    features, hidden = jit_states(head, batch)
    outputs = np.asarray(jit_outputs(head, TARGET, batch, features, 5))[0, 0, :3]
    after = after_each(head, outputs, np.asarray(hidden)[0, 3:6], TOKENS[0, 3:6])
    terms = []
    for depth, (wanted, drafted, sure) in enumerate(zip(*after, strict=True)):
        p, q = wanted, drafted
        overlap = np.minimum(p, q).sum()
        expected = -(p * np.log(q)).sum()
        if kind == "dspark":
            expected = 0.1 * expected + 0.9 * np.abs(p - q).sum()
            expected -= overlap * np.log(sure) + (1 - overlap) * np.log(1 - sure)
            np.testing.assert_allclose(metrics["confidence"][depth], sure, rtol=1e-4)
            error = abs(sure - overlap)
            np.testing.assert_allclose(metrics["confidence_error"][depth], error, rtol=1e-3)
        terms.append(float(expected))
        np.testing.assert_allclose(metrics["loss"][depth], expected, rtol=1e-4)
        np.testing.assert_allclose(metrics["overlap"][depth], overlap, rtol=1e-4)
        assert metrics["accuracy"][depth] == (np.argmax(wanted) == np.argmax(drafted))
    for values in metrics.values():
        assert values[3:].tolist() == [0, 0]
    weights = np.exp(-np.arange(5) / 4)
    np.testing.assert_allclose(total, terms @ weights[:3] / weights.sum(), rtol=1e-4)


@EACH_KIND
def test_every_weight_of_the_head_learns(kind: str):
    head, loss, batch = head_of(kind), loss_of(kind), batch_of()
    gradients = jax.jit(jax.grad(lambda head: loss(head, TARGET, batch)[0]))(head)
    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.device_get(gradients)):
        assert np.isfinite(gradient).all() and np.any(gradient != 0), path


def test_the_target_is_not_trained():
    """Through its hidden states: only the embeddings and the LM head, which the head draws on,
    have gradients."""
    head, loss, batch = head_of("dflash"), loss_of("dflash"), batch_of()
    layers = jax.jit(jax.grad(lambda layers: loss(head, TARGET.replace(layers=layers), batch)[0]))(
        TARGET.layers
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(layers))


def test_anchors_stand_before_learned_tokens():
    learned = np.random.default_rng(1).random((4, 50, 20)) < 0.3
    learned[0, 0] = False
    batch: Any = DraftBatch(
        tokens=np.zeros(learned.shape, np.int32),  # pyright: ignore[reportArgumentType]
        learned=learned,  # pyright: ignore[reportArgumentType]
    )
    loss = BlockLoss(steps=3, anchors=4)
    drawn, again, other = (
        np.asarray(loss.drawn(batch, np.random.default_rng(seed)).anchors) for seed in (0, 0, 1)
    )
    assert drawn.shape == (4, 50, 4)
    assert np.array_equal(drawn, again) and not np.array_equal(drawn, other)
    assert (drawn[0, 0] == -1).all()
    for row, anchors in zip(learned.reshape(-1, 20), drawn.reshape(-1, 4), strict=True):
        chosen = anchors[anchors >= 0]
        assert len(chosen) == len(set(chosen)) == min(4, row[1:].sum())
        assert row[chosen + 1].all()


def test_a_row_shorter_than_the_anchors_has_a_block_at_each_place():
    batch = BlockLoss(steps=2, anchors=64).drawn(batch_of(), np.random.default_rng(0))
    assert batch.anchors is not None
    assert [sorted(row) for row in batch.anchors.tolist()] == [[*range(LENGTH - 1)]] * 2


def test_losses_that_do_not_fit_a_head():
    def start(loss: Loss, head: Any) -> None:
        draft_step.init_state(head, DraftTrainConfig(loss=loss))

    with pytest.raises(ValueError, match="confidence head is trained by a loss that has a weight"):
        start(loss_of("dflash", steps=6), head_of("dspark"))
    with pytest.raises(ValueError, match="trains block heads that draft 4 tokens"):
        start(loss_of("dflash", steps=4), head_of("dflash"))
    with pytest.raises(ValueError, match="a LossConfig trains EAGLE heads"):
        start(LossConfig(), head_of("dflash"))
    with pytest.raises(ValueError, match="trains block heads that draft 5 tokens"):
        start(loss_of("dflash"), init_head(TARGET, tiny_config(num_layers=1), "eagle1"))
    with pytest.raises(ValueError, match="drafts at least one token"):
        BlockLoss(steps=0)
