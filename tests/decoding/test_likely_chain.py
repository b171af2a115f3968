"""Chains that end where they are unlikely: which tokens they have, and that texts stay the same."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec import BUILT_IN_HEAD
from jaxspec.checkpoints import load_drafter as drafter_loading
from jaxspec.checkpoints.load import load
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import Drafter, EagleDrafter, MixedDrafter
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import Sampling, make_sampling, process_logits
from jaxspec.decoding.trees.grow import Beams, Proposer, grow
from jaxspec.decoding.trees.likely_chain import grow_while_likely
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.parallel import WHOLE
from tests.helpers.random_models import (
    as_dtype,
    generate,
    make_params,
    mtp_drafter,
    random_prompts,
    random_target,
)

VOCAB, DEPTH = 12, 6
ROOTS = jax.device_put(np.arange(5, dtype=np.int32))
TABLE = as_dtype(2.5 * np.random.default_rng(0).standard_normal((VOCAB, VOCAB)), jnp.float32)
SPEC = SpeculationConfig.chain(DEPTH)
LEAST = 0.15
PROMPTS = random_prompts((9, 14, 5), seed=8)


def proposer_of(spec: SpeculationConfig, sampling: Sampling) -> Proposer:
    lens = jnp.full(ROOTS.shape, 20)
    return Proposer(RoundOptions(spec), sampling, lens, WHOLE, None, VOCAB, WHOLE)


def step(beams: Beams, count: Array) -> tuple[Array, Array]:
    return TABLE[beams.tokens], count + 1


@functools.partial(jax.jit, static_argnames="least")
def grow_early(sampling: Sampling, active: Array, least: float) -> tuple[DraftTree, Array]:
    start = ROOTS, TABLE[ROOTS], step, jnp.int32(0)
    return grow_while_likely(proposer_of(SPEC, sampling), *start, active, least)


@jax.jit
def grow_whole(sampling: Sampling) -> Array:
    return grow(proposer_of(SPEC, sampling), ROOTS, TABLE[ROOTS], step, jnp.int32(0))[0].tokens


processed = jax.jit(process_logits)


@functools.cache
def sampling_at(temperature: float) -> Sampling:
    return make_sampling(len(ROOTS), temperature=temperature, seeds=np.arange(5))


def grown(
    least: float, active: Array | np.ndarray, temperature: float = 0.0
) -> tuple[DraftTree, int]:
    """Chains over a table in the place of a model, and how often this was asked."""
    tree, count = jax.device_get(grow_early(sampling_at(temperature), active, least))
    return tree, int(count)


@functools.cache
def whole(temperature: float) -> np.ndarray:
    """The tokens of chains that do not end early: [B, 1 + DEPTH]."""
    return np.asarray(grow_whole(sampling_at(temperature)))


@functools.cache
def likelihoods(temperature: float) -> np.ndarray:
    """Of each prefix of these chains: [B, DEPTH]."""
    tokens, sampling = whole(temperature), sampling_at(temperature)
    logits = np.asarray(processed(np.asarray(TABLE)[tokens[:, :-1]], sampling))
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    softmax = exps / exps.sum(-1, keepdims=True)
    each = np.take_along_axis(softmax, tokens[:, 1:, None], axis=2)[..., 0]
    return np.cumprod(each, axis=1)


temperatures = pytest.mark.parametrize("temperature", [0.0, 0.8])


@temperatures
def test_a_chain_that_never_ends_early_is_that_of_grow(temperature: float):
    tree, steps = grown(1e-30, np.ones(5, bool), temperature)
    assert tree.tokens.tolist() == whole(temperature).tolist()
    assert tree.num_nodes.tolist() == [1 + DEPTH] * 5 and steps == DEPTH - 1


@temperatures
@pytest.mark.parametrize("rows", [[0], [1], [2], [3], [4], [0, 3], [0, 1, 2, 3, 4]])
def test_a_chain_ends_where_no_active_row_is_likely(rows: list[int], temperature: float):
    active = np.isin(np.arange(5), rows)
    tree, steps = grown(LEAST, active, temperature)
    likely = (likelihoods(temperature)[rows] >= LEAST).any(axis=0)
    depth = 1 + np.argmin(np.append(likely[:-1], False))  # one token past the last likely draft
    assert tree.num_nodes.tolist() == [1 + depth] * 5 and steps == depth - 1
    wanted = whole(temperature)
    assert tree.tokens[:, : 1 + depth].tolist() == wanted[:, : 1 + depth].tolist()
    assert (
        tree.tokens[:, 1 + depth :].tolist()
        == np.repeat(np.asarray(ROOTS)[:, None], DEPTH - depth, axis=1).tolist()
    )


def test_the_cases_end_at_several_depths():
    ends = {int(grown(LEAST, np.arange(5) == row)[0].num_nodes[0]) for row in range(5)}
    assert len(ends) > 2


# Edge cases, on tables whose probabilities are exact or nearly so.

ALL, NOBODY = jax.device_put((np.ones(5, bool), np.zeros(5, bool)))
NEVER = -1e9  # a logit of a token that is never drawn


def successors(*columns: int) -> Array:
    """A table in which one of these tokens, all equally likely, follows on any token."""
    table = np.full((VOCAB, VOCAB), NEVER, np.float32)
    table[:, columns] = 0
    return jax.device_put(table)


def drafted(
    table: Array, least: float, wanted: Array = ALL, depth: int = DEPTH
) -> tuple[DraftTree, list[np.ndarray]]:
    """A chain over a table, and the masks [B, words] that the steps were given, in their order."""
    tree, masks = jax.device_get(draft(table, wanted, np.float32(least), depth))
    return tree, [mask for mask in masks if mask.any()]


@functools.partial(jax.jit, static_argnames="depth")
def draft(table: Array, wanted: Array, least: Any, depth: int) -> tuple[DraftTree, Array]:
    proposer = proposer_of(SpeculationConfig.chain(depth), make_sampling(len(ROOTS)))
    words = -(-depth // 32)

    def step(beams: Beams, masks: Array) -> tuple[Array, Array]:
        assert beams.tokens.shape == (len(ROOTS), 1)
        return table[beams.tokens], masks.at[beams.depth - 1].set(beams.ancestors[:, 0])

    masks = jnp.zeros((depth, len(ROOTS), words), jnp.uint32)
    start = ROOTS, table[ROOTS], step, masks
    return grow_while_likely(proposer, *start, wanted, least)


@pytest.mark.parametrize(
    ("table", "least", "wanted"),
    [
        (TABLE, 1.0, ALL),
        (successors(3), 1e-30, NOBODY),
        (jnp.asarray(np.full((VOCAB, VOCAB), np.nan, np.float32)), 1e-30, ALL),
    ],
    ids=["nothing is likely", "nobody asks", "NaN"],
)
def test_one_token_is_always_drafted_and_the_model_not_run(
    table: Array, least: float, wanted: Array
):
    tree, masks = drafted(table, least, wanted)
    assert tree.num_nodes.tolist() == [2] * 5 and not masks
    assert tree.tokens.shape == (5, 1 + DEPTH)


def test_certain_drafts_are_as_long_as_the_tree_allows():
    """A draft that is exactly as likely as it must be goes on."""
    tree, masks = drafted(successors(3), 1.0)
    assert tree.num_nodes.tolist() == [1 + DEPTH] * 5 and len(masks) == DEPTH - 1
    assert tree.tokens.tolist() == [[root] + [3] * DEPTH for root in ROOTS.tolist()]


@pytest.mark.parametrize(("least", "length"), [(0.6, 1), (0.4, 2), (0.2, 3), (0.1, 4)])
def test_of_equally_likely_tokens_the_first_is_taken_with_its_own_probability(
    least: float, length: int
):
    """Drafts of 1, 2, 3 tokens have probabilities 1/2, 1/4, 1/8."""
    tree, masks = drafted(successors(9, 4), least)
    assert tree.num_nodes.tolist() == [1 + length] * 5 and len(masks) == length - 1
    assert (np.asarray(tree.tokens)[:, 1 : 1 + length] == 4).all()


def test_a_limit_of_one_token_runs_no_step():
    tree, masks = drafted(successors(3), 1e-30, depth=1)
    assert tree.tokens.tolist() == [[root, 3] for root in ROOTS.tolist()]
    assert tree.num_nodes.tolist() == [2] * 5 and not masks


def test_the_nodes_of_a_long_chain_see_all_before_them():
    """Past 32 nodes a mask has a second word."""
    tree, masks = drafted(successors(3), 1.0, depth=35)
    assert tree.num_nodes.tolist() == [36] * 5 and len(masks) == 34
    for node, mask in enumerate(masks):
        assert (mask == [(1 << min(node + 1, 32)) - 1, (1 << max(node - 31, 0)) - 1]).all()


def test_a_certain_row_keeps_the_uncertain_ones_growing():
    """Rows 3 and 4 go on for ever between their own tokens; the others guess."""
    guesses = np.zeros((VOCAB, VOCAB), np.float32)
    guesses[[3, 4]] = NEVER
    guesses[[3, 4], [4, 3]] = 0
    table = jax.device_put(guesses)
    assert drafted(table, 0.9)[0].num_nodes.tolist() == [1 + DEPTH] * 5
    assert drafted(table, 0.9, ROOTS == 4)[0].num_nodes.tolist() == [1 + DEPTH] * 5
    assert drafted(table, 0.9, ROOTS < 3)[0].num_nodes.tolist() == [2] * 5


def ending_at(drafter: Drafter, least: float) -> Drafter:
    if isinstance(drafter, MixedDrafter):
        return drafter.replace(model=ending_at(drafter.model, least))
    assert isinstance(drafter, EagleDrafter)
    return drafter.replace(least_probability=least)


def texts(
    name: str, spec: SpeculationConfig, sampling: Sampling, least: float = 0.0
) -> tuple[list[list[int]], float]:
    """Texts in a batch, and the mean number of drafted tokens of a round."""
    params = make_params(name, spec)
    if least:
        params = params.replace(drafter=ending_at(params.drafter, least))
    made, state = generate(params, PROMPTS, sampling=sampling)
    rounds, drafted = np.asarray(state.rows.stats.counts).sum(axis=0)[:2]
    return made, drafted / rounds


def check_texts(name: str, temperature: float) -> float:
    """Early ends change no text. Returns the mean number of drafted tokens of a round."""
    sampling = make_sampling(len(PROMPTS), temperature=temperature, seeds=np.arange(3))
    plain, _ = texts("none", SpeculationConfig.chain(1), sampling)
    early, drafted = texts(name, SPEC, sampling, least=0.3)
    assert early == plain
    return drafted


@pytest.mark.slow  # the built-in pair drafts so, in tests/docs/test_examples.py too
def test_texts_are_those_of_plain_decoding():
    assert 1 <= check_texts("eagle3", 0.8) < DEPTH - 1


@pytest.mark.slow  # whole chains, whose every step is compiled, beside them
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["mixed", "eagle3", "mtp"])  # mixed: EAGLE-3's, and lookup
def test_texts_are_those_of_whole_chains(name: str, temperature: float):
    sampling = make_sampling(len(PROMPTS), temperature=temperature, seeds=np.arange(3))
    whole_chains, drafted = texts(name, SPEC, sampling)
    plain, _ = texts("none", SpeculationConfig.chain(0), sampling)
    assert whole_chains == plain
    assert check_texts(name, temperature) < drafted


def test_where_chains_do_not_end_early():
    """With rejection a row's text depends on its draft, which must not depend on other rows."""
    drafter: Any = ending_at(make_params("eagle3", SPEC).drafter, 0.5)
    drawn, several = SpeculationConfig.chain(3, "rejection"), mtp_drafter(random_target(), 2)
    assert drafter._ends_early(SPEC) and not drafter._ends_early(drawn)
    assert not drafter._ends_early(dataclasses.replace(drawn, proposal="top_k"))
    assert not drafter._ends_early(SpeculationConfig(8, 3, 2))
    assert not several.replace(least_probability=0.5)._ends_early(SPEC)


def test_heads_end_early_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch):
    on_cpu = load(drafter=BUILT_IN_HEAD).drafter
    assert (
        isinstance(on_cpu, EagleDrafter)
        and on_cpu.least_probability == drafter_loading.LEAST_PROBABILITY
    )
    assert not on_cpu.listens  # its vocabulary is the target's
    monkeypatch.setattr(drafter_loading, "platform_of", lambda mesh: "gpu")
    on_gpu = load(drafter=BUILT_IN_HEAD).drafter
    assert isinstance(on_gpu, EagleDrafter) and on_gpu.least_probability == 0
