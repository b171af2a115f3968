"""The shape of the draft tree may change from call to call: never the text, nor later drafts.

By default this is tested in engines and of rows: test_the_shape_may_change_between_calls in
test_engine.py, the histories of test_rows.py, and the calls of any shape in
tests/models/test_block_heads.py.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.functional import EngineParams
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    DRAFTERS,
    admit_prompts,
    empty_state,
    jit_decode,
    make_params,
    random_prompts,
    read_prompts,
    texts,
)

PROMPTS = random_prompts((5, 1, 14), seed=4)
CAPACITY = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)
SHAPES = {"tree": None, "chain": TreeShape(3, 2), "plain": PLAIN}
LENGTH, ROUNDS = 96, 5  # more plain rounds than the drafters can let wait

each_drafter = pytest.mark.parametrize("drafter", [slow(name) for name in DRAFTERS])


@functools.cache
def params_of(drafter: str) -> EngineParams:
    return make_params(drafter, CAPACITY)


def test_a_tree_wider_than_the_draft_vocabulary_is_refused():
    params = make_params("eagle3", SpeculationConfig(num_nodes=66, max_depth=1, top_k=65))
    state = empty_state(params, 3, LENGTH, 4)
    with pytest.raises(ValueError, match="top_k 65 is wider than the draft vocabulary of 64 tok"):
        jax.eval_shape(functools.partial(functional.decode, max_rounds=1), params, state, 1)


def start(params: EngineParams, prompts: list[Any]) -> EngineState:
    """A state that has read the prompts, half of its rows greedy."""
    sampling = make_sampling(3, temperature=np.array([0.0, 0.8, 0.8]), seeds=np.array([5, 6, 7]))
    empty = empty_state(params, 3, LENGTH, 4)
    return read_prompts(params, admit_prompts(params, empty, prompts, sampling=sampling))


def run(
    params: EngineParams, state: EngineState, shape: str, rounds: int
) -> tuple[EngineState, Emitted]:
    return jit_decode(params, state, rounds, max_rounds=LENGTH, shape=SHAPES[shape])


@functools.cache
def plain_texts() -> list[list[int]]:
    """By plain rounds of an n-gram drafter, which are those without a drafter: test_engine.py."""
    params = params_of("ngram")
    return texts(run(params, start(params, PROMPTS), "plain", LENGTH)[0])


@each_drafter
def test_calls_of_any_shapes_give_the_text_of_plain_decoding(drafter: str):
    params, rng = params_of(drafter), np.random.default_rng(0)
    names = [*SHAPES, *rng.choice(list(SHAPES), 4)]
    state, accepted = start(params, PROMPTS), dict.fromkeys(SHAPES, 0)
    for name in names:
        state, emitted = run(params, state, name, int(rng.integers(1, ROUNDS + 1)))
        accepted[name] += int(emitted.accepted.sum())
        for text, expected in zip(texts(state), plain_texts(), strict=True):
            assert text == expected[: len(text)]
    assert accepted["plain"] == 0
    assert accepted["tree"] > 0, "this run tested little"
    assert accepted["chain"] > 0 or drafter == "ngram"
    state, _ = run(params, state, "tree", LENGTH)
    assert texts(state) == plain_texts()


@each_drafter
@pytest.mark.parametrize("before", [("plain",), ("tree", "plain", "chain"), ("chain", "plain")])
def test_a_drafter_that_resumes_drafts_as_if_it_had_just_read_the_text(
    drafter: str, before: tuple[str, ...]
):
    params = params_of(drafter)
    state = start(params, PROMPTS)
    for name in before:
        state, _ = run(params, state, name, ROUNDS)
    read = [np.array(text[:-1]) for text in texts(state)]
    fresh = start(params, read)
    assert texts(fresh) == texts(state), "the last token is sampled anew, and alike"
    for name in ("tree", "chain"):
        state, resumed = run(params, state, name, 4)
        fresh, expected = run(params, fresh, name, 4)
        for found, wanted in zip(jax.tree.leaves(resumed), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (TreeShape(9, 3, 2), "engine's largest, which has 8 nodes and depth 3"),
        (TreeShape.parse("chain:4"), "engine's largest, which has 8 nodes and depth 3"),
        (TreeShape(8, 3, 3), "needs 10 slots, the engine has 8"),
    ],
)
def test_a_shape_beyond_the_capacity_is_an_error(shape: TreeShape, message: str):
    params = params_of("ngram")
    with pytest.raises(ValueError, match=message):
        functional.decode(params, empty_state(params, 3, LENGTH, 4), 1, shape=shape)


def test_a_shape_that_the_proposal_does_not_go_with_is_an_error():
    spec = SpeculationConfig(4, 3, 1, acceptance="rejection", proposal="sampled")
    params = make_params("draft_model", spec)
    with pytest.raises(ValueError, match="does not go with"):
        functional.decode(params, empty_state(params, 3, LENGTH), 1, shape=TreeShape(3, 1, 2))


def test_plain_calls_go_with_every_proposal():
    spec = SpeculationConfig(4, 3, 1, acceptance="rejection", proposal="sampled")
    assert spec.with_shape(PLAIN).is_plain


def test_an_engine_without_a_drafter_decodes_plainly():
    params = params_of("none")
    assert params.round_options().speculation.is_plain
    assert params.round_options(PLAIN) == params.round_options()
    with pytest.raises(ValueError, match="no drafter"):
        params.round_options(TreeShape(3, 2))
