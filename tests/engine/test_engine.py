"""The engine: requests come, wait, are preempted or cancelled; each has its text of its own."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from tests.helpers.compilations import Compilations
from tests.helpers.engine_histories import (
    SHAPES,
    History,
    alone,
    check_pages,
    crowded,
    histories,
    run_history,
)
from tests.helpers.engines import new_engine, ready_engine
from tests.helpers.marks import slow
from tests.helpers.programs import traces
from tests.helpers.random_models import DRAFTERS, random_prompts, random_target

PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 9, 2), seed=6)]
GREEDY = SamplingParams(max_tokens=20)


@functools.cache
def engine() -> Engine:
    return ready_engine()


def expected() -> list[list[int]]:
    return [alone(tuple(prompt), GREEDY) for prompt in PROMPTS]


def start(own: Engine) -> list[Generation]:
    return own.add_all(PROMPTS, [GREEDY] * 3)


def texts(own: Engine, generations: list[Generation]) -> list[list[int]]:
    own.finish(generations)
    return [generation.token_ids for generation in generations]


@pytest.mark.slow  # by default: engines that are sealed serve greedy and sampled requests, below
def test_two_traces_serve_all_sampling_parameters():
    own, rng = new_engine("none"), np.random.default_rng(0)
    before = traces(own.programs.decode), traces(own.programs.prefill)
    for index in range(8):
        sampling = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.5, 1.0])) if index % 4 else 0.0,
                top_k=int(rng.choice([0, 1, 40])),
                top_p=float(rng.choice([0.3, 0.9, 1.0])),
                min_p=float(rng.choice([0.0, 0.1])),
                seed=int(rng.integers(2**32)) if rng.random() < 0.7 else None,
                max_tokens=int(rng.integers(1, 9)),
                stop_token_ids=tuple(rng.integers(96, size=rng.integers(3)).tolist()),
            )
            for _ in range(4)
        ]
        own.finish(own.add_all([[index + 1, row] for row in range(4)], sampling))
    assert traces(own.programs.decode) - before[0] <= 2, "one for greedy calls, one for all others"
    assert traces(own.programs.prefill) - before[1] <= 2


def test_requests_that_come_later_join_those_that_run():
    own = engine()
    first = own.add(PROMPTS[0], GREEDY)
    while len(first.token_ids) < 4:
        own.step(1)
    others = [own.add(prompt, GREEDY) for prompt in PROMPTS[1:]]
    assert texts(own, [first, *others]) == expected()
    assert min(len(other.token_ids) for other in others) == 20
    check_pages(own)


def test_more_requests_than_rows_wait_for_their_turn():
    own = engine()
    prompts = [prompt.tolist() for prompt in random_prompts((3, 17, 1, 30, 8, 8, 5), seed=4)]
    sampling = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=5 + 4 * i) for i in range(7)]
    found = texts(own, own.add_all(prompts, sampling))
    assert found == [alone(tuple(p), s) for p, s in zip(prompts, sampling, strict=True)]
    check_pages(own)


def test_a_cancelled_request_frees_its_row_and_disturbs_nobody():
    own = engine()
    for steps in range(5):
        generations = start(own)
        for _ in range(steps):
            own.step(1)
        own.cancel(generations[1])
        own.cancel(generations[1])  # does nothing
        assert generations[1].finish_reason == "cancelled"
        found = texts(own, generations)
        assert [found[0], found[2]] == [expected()[0], expected()[2]]
        assert found[1] == expected()[1][: len(found[1])]
        check_pages(own)


def test_a_request_may_have_a_time_limit():
    own = engine()
    late, other = own.add(PROMPTS[0], GREEDY, timeout=0.0), own.add(PROMPTS[1], GREEDY)
    own.finish([late, other])
    assert late.finish_reason == "timeout" and late.token_ids == []
    assert other.token_ids == expected()[1]


def test_an_error_ends_all_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch):
    own = ready_engine()
    generations = start(own)
    own.step(1)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own.programs, "decode", interrupted)
        own.step(1)
    for generation in generations:
        assert generation.finish_reason == "error" and "KeyboardInterrupt" in str(generation.error)
    assert texts(own, start(own)) == expected()
    check_pages(own)


def test_a_state_that_an_interrupted_call_took_is_made_anew(compilations: Compilations):
    own, plain = ready_engine(), expected()
    start(own)
    own.step(1)
    for leaf in jax.tree.leaves(own.programs.state):
        leaf.delete()
    compilations.clear()
    with pytest.raises(RuntimeError, match="deleted"):
        own.step(1)
    assert texts(own, start(own)) == plain
    assert compilations == [], "the program that made the first state makes the next one"


def test_engines_of_equal_shapes_share_the_programs_that_make_their_states(
    compilations: Compilations,
):
    new_engine()
    compilations.clear()
    other = new_engine()
    assert compilations == [] and not any(map(np.any, jax.tree.leaves(other.programs.state.pool)))


def test_the_first_tokens_come_before_the_rounds_are_compiled():
    own = new_engine("none", rounds_per_call=3)
    before, generations = traces(own.programs.decode), start(own)
    while not all(generation.token_ids for generation in generations):
        own.step()
    assert traces(own.programs.decode) == before
    assert texts(own, generations) == expected()
    assert traces(own.programs.decode) == before + 1


@pytest.mark.slow  # by default: after any history, below
def test_the_shape_may_change_between_calls():
    own = engine()
    generations = start(own)
    for index in range(40):
        own.shape = SHAPES[index % 3]
        own.step(2)
    own.shape = None
    assert texts(own, generations) == expected()


@pytest.mark.slow
def test_a_prompt_longer_than_the_widest_program_is_read_in_pieces():
    prompt, sampling = random_prompts((700,))[0].tolist(), SamplingParams(max_tokens=9)
    found = []
    for budget in (2048, 100):
        own = new_engine(max_length=1024, prefill_budget=budget)
        found += texts(own, [own.add(prompt, sampling)])
    assert found[0] == found[1] and len(found[0]) == 9


def test_weights_are_not_swapped_under_requests():
    own = engine()
    generations = start(own)
    own.step(1)
    with pytest.raises(RuntimeError, match="requests are under way"):
        own.use_target(own.params.target)
    for generation in generations:
        own.cancel(generation)
    own.use_target(own.params.target)
    assert texts(own, start(own)) == expected()


@pytest.mark.slow
def test_other_weights_find_no_pages_of_the_old_ones():
    own, prompt = new_engine(), [*range(1, 30)]
    [old] = texts(own, [own.add(prompt, GREEDY)])
    own.use_target(random_target(seed=5))
    [new] = texts(own, [own.add(prompt, GREEDY)])
    assert own.scheduler.cache_statistics() == (29, 0)
    assert new != old
    again = texts(own, [own.add(prompt, GREEDY)])
    assert again == [new] and own.scheduler.cache_statistics()[1] > 0


@given(history=histories(5, 40))
@settings(deadline=None, max_examples=5)
def test_after_any_history_each_text_is_the_one_it_has_alone(history: History):
    """The guard of test_engine_histories.py; the engine is that of the next tests."""
    run_history(crowded("eagle3", "swap"), history, SHAPES[:2])


@pytest.mark.parametrize("drafter", ["eagle3", *(slow(d) for d in DRAFTERS if d != "eagle3")])
@pytest.mark.parametrize("preemption", [slow("recompute"), "swap"])
def test_preempted_requests_have_their_texts(drafter: str, preemption: str):
    own = crowded(drafter, preemption)
    before = own.scheduler.preemptions[preemption]
    prompts = [prompt.tolist() for prompt in random_prompts((20, 9, 14, 3, 25), seed=3)]
    sampling = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=30) for i in range(5)]
    found = texts(own, own.add_all(prompts, sampling))
    assert found == [alone(tuple(p), s) for p, s in zip(prompts, sampling, strict=True)]
    assert own.scheduler.preemptions[preemption] > before
    check_pages(own)


@pytest.mark.parametrize("drafter", ["eagle3", slow("none"), slow("draft_model")])
def test_the_hits_of_the_prefix_cache_are_those_of_plain_decoding(drafter: str):
    """A conversation: each prompt is the one before with its answer, and a little more."""
    own, prompt, texts_ = crowded(drafter, "swap"), PROMPTS[0], []
    before = own.scheduler.cache_statistics()
    for turn in range(4):
        sampling = SamplingParams(max_tokens=9 + turn)
        [text] = texts(own, [own.add(prompt, sampling)])
        assert text == alone(tuple(prompt), sampling)
        prompt = [*prompt, *text, 7]
        texts_.append(len(prompt))
    queries, hits = np.subtract(own.scheduler.cache_statistics(), before)
    assert queries == 5 + sum(texts_[:3])
    # Of an answer all but its last token, the root, has KV; full pages of 8 are found.
    assert hits == sum((length - 2) // 8 * 8 for length in texts_[:3])
