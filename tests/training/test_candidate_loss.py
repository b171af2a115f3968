"""The loss of block heads that choose among candidates: its terms, and that training scores the
candidates as the drafter does."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.block import save_block_head
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.heads import BlockHead
from jaxspec.models.heads.corrections import PairScores
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.block_loss import BlockLoss, Blocks, blocks_of
from jaxspec.training.heads.candidate_loss import (
    CandidateLoss,
    behind,
    block_loss_for,
    forced_scores,
    known_candidates,
)
from jaxspec.training.heads.loss import DraftBatch, target_states
from jaxspec.training.heads.step import DraftTrainConfig
from tests.helpers.block_heads import LATTICE, block_target, random_head
from tests.helpers.correction_reference import lilicorr_scores, selector_scores
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
EMBED, VOCAB = np.asarray(TARGET.embed), TARGET.config.vocab_size
DEPTH, ANCHOR = 5, 4
LATTICE_SIZES = {"count": 8, "heads": 2, "eps": 1e-5, "vector_eps": 1e-4, "scale": 4.0}
REFERENCES: dict[str, Any] = {
    "dflash2": functools.partial(selector_scores, count=9),
    "lilicorr": functools.partial(lilicorr_scores, embeddings=EMBED, sizes=LATTICE_SIZES),
}
# Weights of the candidates' cross entropy and of regret, as published.
WEIGHTS = {"dflash2": (1, 0), "lilicorr": (0.25, 0.25)}


def head_of(kind: str) -> BlockHead:
    return random_head(TARGET.config, kind, capture=(0, 2))


def batch_of(tokens: Any, anchors: Any) -> DraftBatch:
    tokens = jnp.asarray(tokens, jnp.int32)
    learned = jnp.ones(tokens.shape, bool)
    return DraftBatch(tokens=tokens, learned=learned, anchors=jnp.asarray(anchors, jnp.int32))


def blocks(head: BlockHead, batch: DraftBatch) -> Blocks:
    features, hidden = target_states(TARGET, batch, head.capture, dense_causal_attend)
    return blocks_of(head, TARGET, batch, features, hidden, DEPTH)


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def seen(head: BlockHead, batch: DraftBatch) -> tuple[Blocks, jax.Array, jax.Array]:
    """The blocks of a batch, and both models' logits [B, A, T, V] at their places."""
    found = blocks(head, batch)
    return found, head.logits(TARGET, found.outputs), decoder.logits(TARGET, found.wanted)


def row_with_candidates(head: BlockHead) -> np.ndarray:
    """A row whose tokens after the anchor are candidates of the block there, but for the third. (A
    block does not depend on them.)"""
    row = np.random.default_rng(0).integers(VOCAB - 1, size=(1, ANCHOR + DEPTH + 1))
    logits = np.asarray(seen(head, batch_of(row, [[ANCHOR]]))[1])[0, 0]
    ranks = [2, 0, VOCAB - 1, 1, 3]
    row[0, ANCHOR + 1 :] = [np.argsort(-one)[rank] for one, rank in zip(logits, ranks, strict=True)]
    return row


@pytest.mark.parametrize("kind", ["dflash2", slow("lilicorr")])
def test_loss_and_metrics_by_hand(kind: str, tmp_path: Path):
    """The scores are those of the published equations, behind the row's tokens."""
    head, loss = head_of(kind), block_loss_for(kind, DEPTH, 1)  # pyright: ignore[reportArgumentType]
    save_block_head(head, tmp_path, TARGET)
    batch = batch_of(row := row_with_candidates(head), [[ANCHOR]])
    total, metrics = jax.jit(loss, compiler_options=FAST_COMPILE)(head, TARGET, batch)
    found, logits, wanted = jax.device_get(seen(head, batch))
    outputs, context = (np.float64(x[0, 0]) for x in (found.outputs, found.context))
    more = {"context": context} if kind == "lilicorr" else {}
    tensors = load_file(tmp_path / "model.safetensors")
    root = int(row[0, ANCHOR])
    pairs = REFERENCES[kind](tensors, outputs, np.float64(logits[0, 0]), root, **more)
    terms = []
    for depth in range(DEPTH):
        both = (
            np.asarray(jax.nn.log_softmax(x[0, 0, depth]), np.float64) for x in (logits, wanted)
        )
        log_q, log_p = both
        before = int(row[0, ANCHOR + depth])
        tokens = list(dict.fromkeys(token for _, token in pairs[depth]))
        known = (before, tokens[0]) in pairs[depth]
        assert known == (depth != 3)
        scores = np.array([pairs[depth][before, one] if known else log_q[one] for one in tokens])
        choice = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        p = np.exp(log_p[tokens])
        of_choice, of_regret = WEIGHTS[kind]
        expected = -(np.exp(log_p) * log_q).sum() - of_choice * (p * np.log(choice)).sum()
        expected += of_regret * (choice * (log_p.max() - log_p[tokens])).sum()
        terms.append(expected)
        np.testing.assert_allclose(metrics["loss"][depth], expected, rtol=1e-4)
        overlap = np.minimum(p, choice).sum()
        np.testing.assert_allclose(metrics["overlap"][depth], overlap, rtol=1e-3)
        right = tokens[int(np.argmax(choice))] == np.argmax(log_p)
        assert metrics["accuracy"][depth] == right
    weights = np.exp(-np.arange(DEPTH) / 4)
    np.testing.assert_allclose(total, terms @ weights / weights.sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "calls"), [("lilicorr", (0,)), slow("lilicorr", (2,)), slow("dflash2", (0, 2))]
)
def test_training_chooses_what_the_drafter_drafts(kind: str, calls: tuple[int, ...]):
    """Behind the tokens of a drafted chain the best candidates are those of the chain; after
    prompts read in chunks and rounds, on pages."""
    head = head_of(kind)
    params = EngineParams(
        target=TARGET,
        drafter=BlockDrafter(head=head),
        speculation=SpeculationConfig.chain(DEPTH),
    )
    state = admit_prompts(params, empty_state(params, 3, 64, 7), random_prompts((1, 9, 21)))
    state = read_prompts(params, state, 5, greedy=True)
    for rounds in calls:
        if rounds:
            state, _ = jit_decode(params, state, rounds, max_rounds=2, shape=None, greedy=True)
        tree = proposed(params, state)
        roots, rows = np.asarray(state.rows.context_lens), np.array(state.rows.tokens)
        for row, root, chain in zip(rows, roots, np.asarray(tree.tokens), strict=True):
            row[root : root + 1 + DEPTH] = chain
        chosen = choices(head, batch_of(rows, roots[:, None]))[:, :, 0].T
        np.testing.assert_array_equal(chosen, tree.tokens[:, 1:])


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def proposed(params: Any, state: EngineState) -> DraftTree:
    options = RoundOptions(params.speculation, greedy=True)
    return params.drafter.propose(params.target, state, options)[0]


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def choices(head: Any, batch: DraftBatch) -> jax.Array:
    """The best candidates behind a batch's tokens, int32 [T, B, A]."""
    found = blocks(head, batch)
    known = known_candidates(head, TARGET, found, head.correction.candidates)
    scores = forced_scores(head.correction, TARGET, found, known)
    return jnp.take_along_axis(known.tokens, scores.argmax(-1, keepdims=True), axis=-1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lilicorr", "dflash2"])
def test_every_weight_of_the_head_learns(kind: str):
    """Of terms test_loss_and_metrics_by_hand is a quick test."""
    head = head_of(kind)
    loss = block_loss_for(kind, DEPTH, 2)  # pyright: ignore[reportArgumentType]
    batch = batch_of(row_with_candidates(head), [[ANCHOR, 2]])
    gradient_of = jax.grad(lambda head: loss(head, TARGET, batch)[0])
    gradients = jax.jit(gradient_of, compiler_options=FAST_COMPILE)(head)
    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.device_get(gradients)):
        assert np.isfinite(gradient).all() and np.any(gradient != 0), path


def test_scores_behind_tokens():
    rng = np.random.default_rng(0)
    tokens = np.array([[[3, 5], [5, 9], [1, 2]]])
    first, pairs = rng.random((1, 2)), rng.random((1, 2, 2, 2))
    scores = PairScores(jnp.array(tokens), jnp.float32(first), jnp.float32(pairs))
    otherwise = jnp.float32(rng.random((1, 3, 2)))
    found = behind(scores, jnp.array([[7, 5, 3]]), otherwise)
    wanted = [first[0], pairs[0, 0, 1], otherwise[0, 2]]  # 3 is a candidate of another depth
    np.testing.assert_allclose(found[0], np.stack(wanted), rtol=1e-6)


def test_losses_that_do_not_fit_a_head():
    def start(loss: BlockLoss, kind: str) -> None:
        draft_step.init_state(head_of(kind), DraftTrainConfig(loss=loss))

    with pytest.raises(ValueError, match="trains block heads that choose among candidates alone"):
        start(CandidateLoss(DEPTH), "dflash")
    with pytest.raises(ValueError, match="of corrections, this loss trains a plain Markov head"):
        start(BlockLoss(DEPTH), "lilicorr")
    with pytest.raises(ValueError, match="no terms of distance and confidence"):
        CandidateLoss(DEPTH, distance_weight=0.9)
    assert LATTICE.candidates == LATTICE_SIZES["count"]
