"""A head that listens: what it hears of plain rounds is what it would have drafted."""

import numpy as np
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters.eagle import HEARD_AT_ONCE, HEARD_FIRST, EagleDrafter
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams, release
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_decode,
    make_params,
    random_prompts,
    read_prompts,
    texts,
)

CHAIN, ONE = TreeShape.parse("chain:3"), TreeShape.parse("chain:1")
PROMPTS = random_prompts((9, 14), seed=5)
ROUNDS = HEARD_FIRST - 1 + 2 * (HEARD_AT_ONCE - 1) + 3  # and three that are not heard yet


def params_of(*, listens: bool) -> EngineParams:
    params = make_params("eagle3", SpeculationConfig.chain(3))
    assert isinstance(params.drafter, EagleDrafter)
    return params.replace(drafter=params.drafter.replace(listens=listens))


PARAMS = params_of(listens=True)


def begun(params: EngineParams, state: EngineState | None = None) -> EngineState:
    sampling = make_sampling(len(PROMPTS), temperature=np.array([0.0, 0.8], np.float32))
    state = empty_state(params, len(PROMPTS), max_length=96) if state is None else state
    return read_prompts(params, admit_prompts(params, state, PROMPTS, sampling=sampling))


def run(
    params: EngineParams, state: EngineState, rounds: int, shape: TreeShape
) -> tuple[EngineState, Emitted]:
    return jit_decode(params, state, rounds, max_rounds=64, shape=shape)


def first_drafts_accepted(params: EngineParams, rounds: int) -> np.ndarray:
    """Whether the first drafted token is right at each place of a plain text: bool [C, B]."""
    state, found = begun(params), []
    for _ in range(rounds):
        _, drafted = run(params, state, 1, ONE)
        state, _ = run(params, state, 1, PLAIN)
        found.append(np.asarray(drafted.accepted)[0] > 0)
    return np.stack(found)


def test_it_hears_what_it_would_have_drafted():
    right = first_drafts_accepted(PARAMS, ROUNDS)
    assert 0.1 < right.mean() < 0.9
    state, emitted = run(PARAMS, begun(PARAMS), ROUNDS, PLAIN)
    heard = ROUNDS - 3
    expected = np.stack([[heard, heard], right[:heard].sum(axis=0)], axis=1)
    np.testing.assert_array_equal(emitted.heard, expected)
    again = begun(PARAMS, release(PARAMS, state, np.arange(len(PROMPTS))))
    np.testing.assert_array_equal(again.rows.draft.heard, np.zeros((2, 2)))


@pytest.mark.parametrize("chain", [ONE, slow(CHAIN)], ids=str)
def test_texts_do_not_depend_on_it(chain: TreeShape):
    """Plain rounds that leave more pending tokens than a chain reads, then chains, and so on."""
    whole, _ = run(PARAMS, begun(PARAMS), 60, PLAIN)
    state, accepted = begun(PARAMS), 0
    for rounds, shape in ((12, PLAIN), (4, chain), (2, PLAIN), (3, ONE), (20, PLAIN), (2, chain)):
        state, emitted = run(PARAMS, state, rounds, shape)
        accepted += int(emitted.accepted.sum())
    assert accepted > 3
    for text, reference in zip(texts(state), texts(whole), strict=True):
        assert text == reference[: len(text)]


@pytest.mark.parametrize("listens", [True, slow(False)])
def test_an_engine_learns_from_plain_rounds_what_drafting_would_give(listens: bool):
    params = params_of(listens=listens).replace(default_tree=True)
    engine = Engine(params, CacheConfig(max_length=64), EngineConfig(max_rows=1))
    engine.shape, request = PLAIN, SamplingParams(max_tokens=40, stop_token_ids=())
    engine.finish([engine.add(PROMPTS[0].tolist(), request)])
    assert set(engine.shapes.rounds) == {PLAIN}
    assert engine.shapes.policy is not None
    seen = engine.shapes.policy.estimate.rounds_seen(CHAIN)
    assert (seen >= HEARD_FIRST - 1) == listens
