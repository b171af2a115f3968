"""MixedDrafter: lookup's tree where it finds a match, the model's elsewhere."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import BUILT_IN_HEAD
from jaxspec.checkpoints.load import load
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import (
    DraftState,
    EagleDrafter,
    MixedDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.decoding.trees.tree import DraftTree, unpack_mask
from jaxspec.functional import EngineParams
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_decode,
    make_drafter,
    make_params,
    random_prompts,
    random_target,
    read_prompts,
    texts,
)

CHAIN = SpeculationConfig.chain(5)
TREE = SpeculationConfig(num_nodes=10, max_depth=3, top_k=3)
DRAWN = SpeculationConfig.chain(3, "rejection")
LENGTH = 160
REPEATS = np.tile(np.array([5, 17, 60, 33, 8], np.int32), 4)[:-1]
NEW, OTHER = random_prompts((14, 9), seed=4)

either_shape = pytest.mark.parametrize("spec", [CHAIN, slow(TREE)], ids=["chain", "tree"])


@functools.partial(jax.jit, static_argnames="greedy", compiler_options=FAST_COMPILE)
def propose(
    params: EngineParams, state: EngineState, *, greedy: bool = True
) -> tuple[DraftTree, DraftState]:
    options = dataclasses.replace(params.round_options(), greedy=greedy)
    return params.drafter.propose(params.target, state, options)


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def catch_up(params: EngineParams, state: EngineState) -> DraftState:
    return params.drafter.catch_up(params.target, state, params.round_options())


@functools.cache
def mixed(spec: SpeculationConfig, **changes: Any) -> EngineParams:
    params = make_params("mixed", spec)
    drafter: Any = params.drafter
    return params.replace(drafter=drafter.replace(**changes))


def alone(params: EngineParams) -> EngineParams:
    """The same, with the model of the mixture as drafter."""
    drafter: Any = params.drafter
    return params.replace(drafter=drafter.model)


def looking_up(spec: SpeculationConfig = CHAIN, min_match: int = 2) -> EngineParams:
    """The same target, with lookup as drafter."""
    return mixed(spec).replace(drafter=NGramDrafter(min_match=min_match))


def start(
    params: EngineParams, prompts: list[Any], temperature: float = 0.0, roots: Any = None
) -> EngineState:
    """A state that has read the prompts; ``roots`` replace the tokens that were sampled."""
    lens = np.array([len(prompt) for prompt in prompts])
    seeds = 3 + np.arange(len(prompts))
    sampling = make_sampling(len(prompts), temperature=temperature, seeds=seeds)
    state = empty_state(params, len(prompts), LENGTH, 4)
    state = admit_prompts(params, state, prompts, sampling=sampling)
    state = read_prompts(params, state, greedy=temperature == 0)
    if roots is not None:
        rows = state.rows
        tokens = rows.tokens.at[np.arange(len(prompts)), lens].set(np.asarray(roots))
        state = state.replace(rows=rows.replace(tokens=tokens))
    return state


def run(params: EngineParams, state: EngineState, rounds: int) -> tuple[EngineState, Emitted]:
    return jit_decode(params, state, rounds, max_rounds=LENGTH)


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root to each node of a row's tree."""
    masks = np.asarray(unpack_mask(tree.ancestors, tree.tokens.shape[1]))[row]
    tokens, count = np.asarray(tree.tokens)[row], int(tree.num_nodes[row])
    return {tuple(tokens[masks[node]].tolist()) for node in range(count)}


# What is proposed.


@pytest.mark.slow
@either_shape
def test_each_row_gets_the_tree_of_its_drafter(spec: SpeculationConfig):
    params = mixed(spec)
    # The second row repeats itself, the others do not.
    state = start(params, [NEW, REPEATS, OTHER], roots=[1, 8, 2])
    tree, _ = propose(params, state)
    of_model, _ = propose(alone(params), state)
    of_lookup, _ = propose(looking_up(spec), state)
    assert of_lookup.num_nodes.tolist()[::2] == [1, 1] and of_lookup.num_nodes[1] > 1
    for row, chosen in enumerate([of_model, of_lookup, of_model]):
        assert paths(tree, row) == paths(chosen, row)
        assert tree.num_nodes[row] == chosen.num_nodes[row]
    assert paths(of_model, 1) != paths(of_lookup, 1)
    chain = (8, 5, 17, 60, 33, 8)[: 1 + spec.max_depth]
    assert chain in paths(tree, 1), "repeated text is continued as it was"


def test_a_match_near_the_end_goes_on_in_a_circle():
    prompts = [[4, 4], [1, 2, 1, 2], [1, 2, 3, 9, 1]]
    state = start(mixed(CHAIN), [np.array(prompt) for prompt in prompts], roots=[4, 1, 2])
    tree, _ = propose(looking_up(), state)
    assert tree.tokens.tolist() == [[4, 4, 4, 4, 4, 4], [1, 2, 1, 2, 1, 2], [2, 3, 9, 1, 2, 3]]


def test_matches_have_a_least_length():
    repeats = [np.array([7, 1, 2, 3, 50, 60, 1, 2])] * 3
    state = start(mixed(CHAIN), repeats, roots=[3, 3, 7])
    for least, nodes in ((3, [6, 6, 1]), (4, [1, 1, 1])):
        tree, _ = propose(looking_up(min_match=least), state)
        assert tree.num_nodes.tolist() == nodes


def test_rows_that_look_up_do_not_keep_the_models_chain_growing():
    """Its chain ends early where the rows that need it have no likely draft, as if alone."""
    model: Any = mixed(CHAIN).drafter

    def ending_at(least: float) -> EngineParams:
        return mixed(CHAIN, model=model.model.replace(least_probability=least))

    def nodes_alone(params: EngineParams, prompt: np.ndarray, root: int) -> int:
        alike = start(params, [prompt] * 3, roots=[root] * 3)  # the shapes of the rows below
        return int(propose(alone(params), alike)[0].num_nodes[0])

    for least in np.geomspace(0.5, 1e-4, 12):
        params = ending_at(float(least))
        needed, looked_up = nodes_alone(params, NEW, 1), nodes_alone(params, REPEATS, 8)
        if needed < looked_up:
            break
    else:
        pytest.fail("these two rows end their chains alike")
    state = start(params, [NEW, REPEATS, REPEATS], roots=[1, 8, 8])
    assert propose(params, state)[0].num_nodes.tolist() == [needed, 6, 6]
    assert propose(alone(params), state)[0].num_nodes.tolist() == [looked_up] * 3


# What the model does meanwhile.


@pytest.mark.slow
def test_where_every_row_looks_up_the_model_only_reads():
    params = mixed(CHAIN)
    state = start(params, [REPEATS] * 3, roots=[8, 8, 8])
    _, after = propose(params, state)
    assert same(after.pool, catch_up(params, state).pool)
    _, drafted = propose(alone(params), state)
    assert not same(after.pool, drafted.pool), "drafting writes scratch slots"


def same(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "temperature"),
    [slow(CHAIN, 0.0), (CHAIN, 0.8), slow(TREE, 0.0), slow(TREE, 0.8)],
    ids=["chain, greedy", "chain", "tree, greedy", "tree"],
)
def test_the_model_drafts_afterwards_as_if_it_had_always_drafted(
    spec: SpeculationConfig, temperature: float
):
    params = mixed(spec)
    prompts = [REPEATS, REPEATS[1:], REPEATS[2:]]  # in the first round, all rows look up
    state, emitted = run(params, start(params, prompts, temperature, roots=[8, 8, 8]), 12)
    assert emitted.accepted.sum() > 0
    own = alone(params)
    fresh = start(own, [np.array(text[:-1]) for text in texts(state)], temperature)
    assert texts(fresh) == texts(state)
    _, resumed = run(own, state.replace(drafter=own.drafter_name), 4)
    _, expected = run(own, fresh, 4)
    assert same(resumed, expected)


@pytest.mark.slow
def test_skipping_changes_nothing_that_is_emitted():
    states = [
        run(params, start(params, [REPEATS, NEW, OTHER]), 16)
        for params in (mixed(CHAIN), mixed(CHAIN, may_skip=False))
    ]
    assert same(states[0][1], states[1][1])


@pytest.mark.slow
def test_any_drafter_can_be_the_model():
    target = random_target()
    params = make_params("none", CHAIN)
    prompts = [REPEATS, NEW, OTHER]
    plain = texts(run(params, start(params, prompts, 0.8), LENGTH)[0])
    for name in ("draft_model", "eagle1"):
        own = params.replace(drafter=MixedDrafter(model=make_drafter(name, target)))
        assert texts(run(own, start(own, prompts, 0.8), LENGTH)[0]) == plain


# Rejection sampling.


@pytest.mark.slow
def test_under_rejection_a_looked_up_token_has_all_of_the_probability():
    params = mixed(DRAWN)
    state = start(params, [NEW, REPEATS, OTHER], 0.8, roots=[1, 8, 2])
    tree, _ = propose(params, state, greedy=False)
    drawn, _ = propose(alone(params), state, greedy=False)
    assert tree.probs is not None and drawn.probs is not None
    np.testing.assert_array_equal(tree.probs[0], drawn.probs[0])
    own = np.eye(tree.probs.shape[-1])[np.asarray(tree.tokens[1])]
    np.testing.assert_array_equal(tree.probs[1], own)


# By name.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lookup", "past"),
    [
        ("ngram", NGramDrafter, 0),
        ("suffix", SuffixDrafter, 0),
        ("suffix:512", SuffixDrafter, 512),
    ],
)
def test_a_mixture_is_loaded_by_name(name: str, lookup: type, past: int):
    drafter = load(drafter=f"{name}+{BUILT_IN_HEAD}").drafter
    assert isinstance(drafter, MixedDrafter) and isinstance(drafter.model, EagleDrafter)
    found: Any = drafter.lookup
    assert isinstance(found, lookup) and drafter.past_tokens == past and found.min_match == 3


@pytest.mark.parametrize("lookup", ["ngram", "suffix"])
@pytest.mark.parametrize("name", ["", "none", "ngram", "suffix", "auto", "ngram+x", "suffix+x"])
def test_lookup_is_mixed_with_a_head_or_a_model(lookup: str, name: str):
    with pytest.raises(
        ValueError, match=rf"after {lookup}\+ give mtp, or the directory or hub id of a head or"
    ):
        load(drafter=f"{lookup}+{name}")
