"""Why rows end, and invalid arguments: every error is reported."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Ending, EngineState, Status
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.helpers.marks import slow
from tests.helpers.programs import new_jit
from tests.helpers.random_models import make_params, padded, random_prompts, random_target, texts

CHAIN = SpeculationConfig.chain(2)
PROMPTS = random_prompts((5, 3, 8), seed=1)
LENS = np.array([len(prompt) for prompt in PROMPTS], np.int32)
LENGTH = 40

admit = new_jit(functional.admit)
prefill = new_jit(functional.prefill, "width", "greedy")
decode = new_jit(functional.decode, "max_rounds", "greedy")


@functools.cache
def params_of(drafter: str) -> EngineParams:
    return make_params(drafter, CHAIN)


def admitted(params: EngineParams, **options: Any) -> EngineState:
    state = functional.init_state(params, 3, LENGTH, page_size=4)
    return admit(params, state, np.arange(3), padded(PROMPTS, 16), LENS, **options)


# Of static arguments none is left out: jit takes one that is left out for another one.


def finished(params: EngineParams, state: EngineState, *, greedy: bool = False) -> EngineState:
    state, _ = prefill(params, state, width=16, greedy=greedy)
    return decode(params, state, LENGTH, max_rounds=LENGTH, greedy=greedy)[0]


def test_rows_of_a_new_state_are_empty_and_stay_so():
    params = params_of("ngram")
    state = functional.init_state(params, 3, LENGTH, page_size=4)
    assert state.rows.status.tolist() == [Status.EMPTY] * 3
    after = finished(params, functional.init_state(params, 3, LENGTH, page_size=4))
    for found, expected in zip(
        jax.tree.leaves(after.rows), jax.tree.leaves(state.rows), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


PAGES = 1 + np.arange(33).reshape(3, 11)  # of rows of 40 tokens and a tree of 3


def pages_of(row: int, count: int) -> np.ndarray:
    """Only the first ``count`` pages of a row are its own."""
    table = PAGES.copy()
    table[row, count:] = 0
    return table


@pytest.mark.parametrize(
    "options",
    [
        {"page_table": pages_of(1, 5)},  # 20 slots, where 40 tokens and the tree may come
        {"page_table": pages_of(1, 3), "max_lens": [40, 10, 40]},  # 12 slots, 13 are needed
        {"max_lens": [40, 41, 40]},
        {"page_table": PAGES + np.array([[0], [20], [0]])},
        {"page_table": PAGES * np.array([[1], [-1], [1]])},
        {"page_table": PAGES * (np.arange(33).reshape(3, 11) != 13), "max_lens": [40, 12, 40]},
    ],
    ids=[
        "no room for a row",
        "no room for the tree",
        "limit past the buffer",
        "pages past the pool's",
        "negative pages",
        "a hole in its pages",
    ],
)
def test_a_request_that_does_not_fit_is_done_at_once(options: dict[str, Any]):
    params = params_of("ngram")
    state = admitted(params, **{k: np.asarray(v, np.int32) for k, v in options.items()})
    assert state.rows.status.tolist() == [Status.READING, Status.DONE, Status.READING]
    assert state.rows.ending.tolist() == [Ending.NONE, Ending.TOO_LONG, Ending.NONE]
    before = np.asarray(state.rows.tokens[1])
    state = finished(params, state)
    assert state.rows.ending.tolist() == [Ending.LENGTH, Ending.TOO_LONG, Ending.LENGTH]
    np.testing.assert_array_equal(state.rows.tokens[1], before)
    assert state.rows.context_lens[1] == 0


@pytest.mark.parametrize("length", [0, LENGTH, LENGTH + 5])
def test_a_prompt_that_leaves_nothing_to_do_or_no_room_is_done_at_once(length: int):
    params = params_of("ngram")
    state = functional.init_state(params, 3, LENGTH, page_size=4)
    lens = np.array([4, length, 4], np.int32)
    state = admit(params, state, np.arange(3), np.ones((3, LENGTH), np.int32), lens)
    assert state.rows.ending.tolist() == [Ending.NONE, Ending.TOO_LONG, Ending.NONE]


def test_a_prompt_longer_than_its_pages_is_done_at_once_whatever_its_limit():
    params = params_of("ngram")
    limits = np.array([40, 40, 1], np.int32)
    state = admitted(params, page_table=pages_of(2, 1), max_lens=limits)  # four slots for eight
    assert state.rows.ending.tolist() == [Ending.NONE, Ending.NONE, Ending.TOO_LONG]


def test_a_limit_that_the_prompt_has_reached_gives_one_token():
    params = params_of("ngram")
    state = finished(params, admitted(params, max_lens=LENS - 1))
    assert state.rows.ending.tolist() == [Ending.LENGTH] * 3
    assert [len(text) for text in texts(state)] == (LENS + 1).tolist()


SAMPLING = make_sampling(3, temperature=np.array([0.0, 0.7, 0.0]))


def test_a_sampling_row_is_refused_by_programs_for_greedy_ones():
    params = params_of("ngram")
    expected = texts(finished(params, admitted(params)))
    state = finished(params, admitted(params, sampling=SAMPLING), greedy=True)
    assert state.rows.ending.tolist() == [Ending.LENGTH, Ending.NOT_GREEDY, Ending.LENGTH]
    found = texts(state)
    assert (found[0], found[2]) == (expected[0], expected[2])


def test_a_sampling_row_is_refused_between_two_calls_and_keeps_its_text():
    params = params_of("ngram")
    state, _ = prefill(params, admitted(params, sampling=SAMPLING), width=16, greedy=False)
    state, _ = decode(params, state, 2, max_rounds=LENGTH, greedy=False)
    before = texts(state)
    state, emitted = decode(params, state, LENGTH, max_rounds=LENGTH, greedy=True)
    assert state.rows.ending.tolist() == [Ending.LENGTH, Ending.NOT_GREEDY, Ending.LENGTH]
    assert emitted.status.tolist() == [Status.DONE] * 3
    assert not emitted.counts[:, 1].any() and texts(state)[1] == before[1]


def broken_target(token: int) -> Decoder:
    """A target whose logits are NaN after it has read ``token``."""
    target = random_target()
    return target.replace(embed=target.embed.at[token].set(jnp.nan))


@pytest.mark.parametrize("drafter", [slow("none"), "ngram"])
def test_text_is_kept_up_to_where_the_logits_are_not_finite(drafter: str):
    whole = texts(finished(params_of("ngram"), admitted(params_of("ngram"))))
    token = whole[0][20]
    params = params_of(drafter).replace(target=broken_target(token))
    state = finished(params, admitted(params))
    found = texts(state)
    for text, expected, prompt, ending in zip(
        found, whole, PROMPTS, state.rows.ending.tolist(), strict=True
    ):
        assert text == expected[: len(text)]
        if ending == Ending.LENGTH:
            assert token not in text[:-1], "it was read, and gave numbers"
        else:
            assert ending == Ending.NOT_FINITE
            # A drafter may guess the token earlier, and then the round is lost.
            assert drafter != "none" or text[-1] == token or token in prompt
    assert state.rows.ending[0] == Ending.NOT_FINITE
    assert len(found[0]) > len(PROMPTS[0])


def test_a_prompt_that_gives_no_numbers_leaves_its_neighbours_alone():
    whole = texts(finished(params_of("ngram"), admitted(params_of("ngram"))))
    alone = set(PROMPTS[0].tolist()) - set(whole[1]) - set(whole[2])
    params = params_of("ngram").replace(target=broken_target(min(alone)))
    state, emitted = prefill(params, admitted(params), width=16, greedy=False)
    assert state.rows.ending.tolist() == [Ending.NOT_FINITE, Ending.NONE, Ending.NONE]
    assert emitted.counts[0].tolist() == [0, 1, 1]
    state, _ = decode(params, state, LENGTH, max_rounds=LENGTH, greedy=False)
    assert texts(state)[1:] == whole[1:]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_params("ngram", SpeculationConfig.chain(3)), "the state was made for Speculation"),
        (make_params("ngram", SpeculationConfig.chain(2, "rejection")), "the state was made for"),
        (make_params("none", CHAIN), r"made for a .*NGramDrafter, these .* a .*NoDrafter"),
    ],
    ids=["capacity", "rule", "drafter"],
)
def test_a_state_of_other_parameters_is_an_error(other: EngineParams, message: str):
    state = functional.init_state(params_of("ngram"), 3, LENGTH)
    rows = np.arange(3)
    for call in (
        lambda: functional.admit(other, state, rows, padded(PROMPTS, 16), LENS),
        lambda: functional.prefill(other, state, width=4),
        lambda: functional.decode(other, state, 1),
        lambda: functional.release(other, state, rows),
    ):
        with pytest.raises(ValueError, match=message):
            call()
