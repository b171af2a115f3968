"""Committed tokens have exactly the target's distribution, whatever is drafted: chi-square tests.

Target and drafter are random Markov chains over a few tokens. Every batch row is an experiment
with a seed of its own: rounds run until it has committed two tokens, and the counts of all pairs
are compared with the target's probabilities. Wrong rules must fail the same test.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding import acceptance
from jaxspec.decoding.acceptance import (
    AcceptanceRule,
    Accepted,
    Match,
    Rejection,
    Synthetic,
    Verified,
)
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import Sampling, make_sampling, process_logits
from jaxspec.decoding.sampling.noise import Stream
from jaxspec.decoding.trees.grow import Beams, Proposer, grow
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.decoding.trees.worth_verifying import cut, worth_verifying
from jaxspec.parallel import WHOLE
from tests.helpers import p_values
from tests.helpers.marks import slow
from tests.helpers.random_models import as_dtype

VOCAB, ROWS = 8, 20_000
ROOT, CONTEXT = 3, 17
P_VALUE = 1e-3  # right rules stay above it; wrong ones fall far below

CHAIN = SpeculationConfig.chain(2)
TREE = SpeculationConfig(num_nodes=8, max_depth=2, top_k=3)
SAMPLINGS = {
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 6, "top_p": 0.9},
}


def random_tables(seed: int) -> tuple[Array, Array]:
    """Logits [V, V] of the next token after each, the target's and a related drafter's."""
    rng = np.random.default_rng(seed)
    target = 1.2 * rng.standard_normal((VOCAB, VOCAB))
    draft = 0.6 * target + 0.8 * rng.standard_normal((VOCAB, VOCAB))
    return as_dtype(target, jnp.float32), as_dtype(draft, jnp.float32)


TARGET, DRAFT = random_tables(0)


def draft_tree(
    spec: SpeculationConfig,
    sampling: Sampling,
    roots: Array,
    context_lens: Array,
    token_ids: Array | None,
) -> DraftTree:
    """Grown by the drafters' own code, from a table in the place of a model."""
    ids = jnp.arange(VOCAB) if token_ids is None else token_ids
    proposer = proposer_of(spec, sampling, context_lens, token_ids)

    def step(beams: Beams, carry: None) -> tuple[Array, None]:
        return DRAFT[beams.tokens][..., ids], carry

    return grow(proposer, roots, DRAFT[roots][:, ids], step, None)[0]


def proposer_of(
    spec: SpeculationConfig,
    sampling: Sampling,
    context_lens: Array,
    token_ids: Array | None = None,
    target_vocab: int = VOCAB,
) -> Proposer:
    return Proposer(
        options=RoundOptions(spec),
        sampling=sampling,
        context_lens=context_lens,
        layout=WHOLE,
        token_ids=token_ids,
        target_vocab=target_vocab,
        target_layout=WHOLE,
    )


def commit_pairs(
    spec: SpeculationConfig,
    rule: AcceptanceRule,
    options: dict[str, Any],
    token_ids: Array | None = None,
    distort: Callable[[DraftTree], DraftTree] = lambda tree: tree,
) -> tuple[np.ndarray, float]:
    """The first two tokens committed in each row [ROWS, 2], and the mean accepted depth."""

    @jax.jit
    def one_round(sampling: Sampling, roots: Any, context_lens: Any) -> Accepted:
        tree = distort(draft_tree(spec, sampling, roots, context_lens, token_ids))
        logits = process_logits(TARGET[tree.tokens], sampling)
        return rule.accept(Verified(tree, logits, sampling, context_lens, WHOLE))

    sampling = make_sampling(ROWS, seeds=np.arange(ROWS, dtype=np.uint32), **options)
    context_lens, roots = np.full(ROWS, CONTEXT, np.int32), np.full(ROWS, ROOT, np.int32)
    first = jax.device_get(one_round(sampling, roots, context_lens))
    second = jax.device_get(one_round(sampling, first.tokens[:, 0], context_lens + 1))
    after = np.where(first.depth > 0, first.tokens[:, 1], second.tokens[:, 0])
    return np.stack([first.tokens[:, 0], after], axis=1), float(first.depth.mean())


@jax.jit
def target_after(sampling: Sampling) -> Array:
    """Probabilities [V, V] of the next token after each."""
    return jax.nn.softmax(process_logits(TARGET[None], sampling)[0])


def p_value(pairs: np.ndarray, options: dict[str, Any]) -> float:
    """Chi-square test of all pairs against the target; 0 if an impossible one was seen."""
    sampling = make_sampling(1, **options)
    after = np.asarray(target_after(sampling), np.float64)
    expected = (ROWS * after[ROOT][:, None] * after).ravel()
    found = np.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    return chi_square(found, expected)


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts, the rare ones put together; 0 if an impossible one was seen."""
    if found[expected == 0].any():
        return 0.0
    rare = expected < 8
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    present = expected > 0
    return p_values.chi_square(found[present], expected[present])


def with_rule(
    spec: SpeculationConfig, acceptance: str, proposal: str | None = None
) -> SpeculationConfig:
    return dataclasses.replace(spec, acceptance=acceptance, proposal=proposal)


RIGHT_RULES = {
    "match, coupled chain": (with_rule(CHAIN, "match"), Match()),
    "match, coupled tree": (with_rule(TREE, "match"), Match()),
    "match, likeliest tree": (with_rule(TREE, "match", "top_k"), Match()),
    "rejection, drawn chain": (with_rule(CHAIN, "rejection"), Rejection()),
    "rejection, likeliest chain": (with_rule(CHAIN, "rejection", "top_k"), Rejection()),
    "rejection, likeliest tree": (with_rule(TREE, "rejection"), Rejection()),
}
FAST_RULES = ("match, coupled tree", "rejection, drawn chain")
REDUCED = jnp.array([6, 1, 3, 4])  # target ids of a draft vocabulary of four


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.slow if name == "plain" else ())
        for name, options in SAMPLINGS.items()
    ],
)
@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        pytest.param(*rule, id=name, marks=() if name in FAST_RULES else pytest.mark.slow)
        for name, rule in RIGHT_RULES.items()
    ],
)
def test_pairs_have_the_targets_distribution(spec, rule, options):
    pairs, depth = commit_pairs(spec, rule, options)
    assert 0.1 < depth < 1.9, "drafts must be accepted and refused"
    assert p_value(pairs, options) > P_VALUE


# By default the trees of test_golden.py are of a reduced vocabulary.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["match, coupled tree", "rejection, drawn chain"])
def test_a_reduced_draft_vocabulary_changes_nothing(name: str):
    (spec, rule), options = RIGHT_RULES[name], SAMPLINGS["plain"]
    pairs, depth = commit_pairs(spec, rule, options, REDUCED)
    assert 0.1 < depth < 1.9
    assert p_value(pairs, options) > P_VALUE


@pytest.mark.slow
def test_coupled_drafts_are_accepted_more_often_than_likeliest_ones():
    depths = [
        commit_pairs(with_rule(CHAIN, "match", proposal), Match(), {"temperature": 1.0})[1]
        for proposal in ("coupled", "top_k")
    ]
    assert depths[0] > depths[1]


@pytest.mark.parametrize("mean_length", [slow(1.75), slow(3.0)])
def test_the_synthetic_rule_accepts_so_many_tokens_a_round(mean_length: float):
    rule = Synthetic(mean_length)
    spec = dataclasses.replace(TREE, acceptance=rule)
    _, depth = commit_pairs(spec, rule, SAMPLINGS["plain"])
    assert abs(depth + 1 - mean_length) < 0.02


# A confidence head's word for what follows each token; chains end where it is worth too little.
SURE = as_dtype(np.random.default_rng(1).uniform(0.1, 1, VOCAB), jnp.float32)


def ended_by(tokens: Array, tree: DraftTree) -> DraftTree:
    """The chain with the tokens that are worth verifying: by the confidence after ``tokens``."""
    return cut(tree, worth_verifying(SURE[tokens], np.array([0.5, 0.3])))


@pytest.mark.parametrize("name", ["rejection, drawn chain", slow("match, coupled chain")])
def test_chains_that_end_by_what_was_drafted_before_change_nothing(name: str):
    (spec, rule), options = RIGHT_RULES[name], SAMPLINGS["truncated"]
    pairs, depth = commit_pairs(
        spec, rule, options, distort=lambda tree: ended_by(tree.tokens[:, :-1], tree)
    )
    assert 0.1 < depth < 1
    assert p_value(pairs, options) > P_VALUE


# Wrong rules, which the test above must detect.


@pytest.mark.slow
def test_the_chi_square_test_detects_chains_that_end_by_the_drawn_token_itself():
    options = SAMPLINGS["plain"]
    spec, rule = RIGHT_RULES["rejection, drawn chain"]
    pairs, _ = commit_pairs(
        spec, rule, options, distort=lambda tree: ended_by(tree.tokens[:, 1:], tree)
    )
    assert p_value(pairs, options) < 1e-9


def claim_flat_draws(tree: DraftTree) -> DraftTree:
    assert tree.probs is not None
    return tree.replace(probs=jnp.full_like(tree.probs, 1 / VOCAB))


@pytest.mark.slow
def test_the_chi_square_test_detects_false_draft_probabilities():
    options = SAMPLINGS["plain"]
    spec = with_rule(CHAIN, "rejection")
    pairs, _ = commit_pairs(spec, Rejection(), options, distort=claim_flat_draws)
    assert p_value(pairs, options) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["RESIDUAL", "ACCEPT"])
def test_the_chi_square_test_detects_noise_shared_with_the_draft(
    shared: str, monkeypatch: pytest.MonkeyPatch
):
    streams = {stream.name: stream for stream in Stream} | {shared: Stream.DRAFT}
    monkeypatch.setattr(acceptance, "Stream", SimpleNamespace(**streams))
    options = SAMPLINGS["plain"]
    pairs, _ = commit_pairs(with_rule(CHAIN, "rejection"), Rejection(), options)
    assert p_value(pairs, options) < 1e-9


WRONG_RESIDUALS = {
    "draws from p after a refusal": lambda p, q, layout: p,
    "forgets to normalize": lambda p, q, layout: jnp.maximum(p - q, 0.0),
}


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("draws from p after a refusal", CHAIN),
        slow("draws from p after a refusal", TREE),
        slow("forgets to normalize", TREE),  # seen by the next sibling; a last draw needs no norm
    ],
)
def test_a_wrong_residual_is_caught(name, spec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptance, "_residual", WRONG_RESIDUALS[name])
    options = SAMPLINGS["plain"]
    pairs, _ = commit_pairs(with_rule(spec, "rejection"), Rejection(), options)
    assert p_value(pairs, options) < 1e-9


def test_the_chi_square_test_detects_a_rule_that_always_accepts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptance, "uniform", lambda *args: jnp.zeros((ROWS, 1, 1)))
    options = SAMPLINGS["plain"]
    pairs, _ = commit_pairs(with_rule(CHAIN, "rejection"), Rejection(), options)
    assert p_value(pairs, options) < 1e-9
