"""Speculation changes how fast the text comes, never the text: token for token, float32."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import Sampling, make_sampling
from jaxspec.decoding.state import Emitted, Ending, EngineState
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    DRAFTERS,
    MAX_LENGTH,
    NEW_TOKENS,
    admit_prompts,
    empty_state,
    generate,
    jit_decode,
    make_params,
    random_prompts,
    random_target,
    read_prompts,
)
from tests.helpers.sampling_reference import reference_texts

PROMPTS = random_prompts((5, 1, 17, 9, 23, 2, 12, 30))
TREES = {
    "chain5": SpeculationConfig.chain(5),
    "tree12": SpeculationConfig(num_nodes=12, max_depth=3, top_k=3),
    "tree60": SpeculationConfig(num_nodes=60, max_depth=8, top_k=8),
}
PAGE_SIZES, BATCHES, TEMPERATURES = (1, 4, 16, 64), (1, 3, 8), (0.0, 0.8)


class Case(NamedTuple):
    drafter: str
    tree: str
    page_size: int
    batch: int
    temperature: float

    def __str__(self) -> str:
        return "-".join(map(str, self))


LOOKUP = ("suffix", "suffix mixed")
CHOICES = ((*DRAFTERS, "mtp", "mtp3", *LOOKUP), tuple(TREES), PAGE_SIZES, BATCHES, TEMPERATURES)
ALL_CASES = [Case(*choice) for choice in itertools.product(*CHOICES)]
# The slow cases are all others. This has the programs of the tests further down. Of the others the
# default tests run EAGLE-3 with lookup in functional/test_rows.py, alone in test_engine.py, and MTP
# layers in tests/models/test_mtp.py.
FAST_CASES = [Case("draft_model", "tree12", 4, 3, 0.8)]


def sampling_of(temperature: float, batch: int) -> Sampling:
    """A seed of its own for each request."""
    seeds = 11 + jnp.arange(batch)
    return make_sampling(batch, temperature=temperature, top_p=0.9, seeds=seeds)


def reference(target: Decoder, temperature: float, guesses: list[list[int]]) -> list[list[int]]:
    """The first prompts and the target's text after them; ``guesses`` only save time."""
    sampling = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=11 + row, max_tokens=NEW_TOKENS)
        for row in range(len(guesses))
    ]
    return reference_texts(target, PROMPTS[: len(guesses)], sampling, MAX_LENGTH, guesses)


@functools.cache
def plain_texts(temperature: float, batch: int = len(PROMPTS)) -> list[list[int]]:
    """The first prompts, decoded one token at a time."""
    guesses, _ = generate(
        make_params("draft_model", TREES["tree12"]),
        PROMPTS[:batch],
        page_size=4,
        sampling=sampling_of(temperature, batch),
    )
    return reference(random_target(), temperature, guesses)


def check(case: Case, params: EngineParams, plain: list[list[int]] | None = None) -> None:
    """The texts that these parameters generate; ``plain``: of plain decoding, by default of the
    target."""
    generated, state = generate(
        params,
        PROMPTS[: case.batch],
        page_size=case.page_size,
        sampling=sampling_of(case.temperature, case.batch),
    )
    if plain is None:
        plain = reference(params.target, case.temperature, generated)
    assert generated == plain[: case.batch]
    stats = state.rows.stats
    mean_length = stats.accepted.sum() / stats.rounds.sum()
    assert mean_length > 1.2, "hardly a draft was accepted: this run tested little"


@pytest.mark.parametrize(
    "case", [*FAST_CASES, *(slow(c) for c in ALL_CASES if c not in FAST_CASES)], ids=str
)
def test_text_is_that_of_plain_decoding(case: Case):
    check(case, make_params(case.drafter, TREES[case.tree]))


# The rest runs one small tree in batches of three, sampled, unless it says otherwise: these tests
# share their compiled programs.

TREE = TREES["tree12"]
SAMPLED = 0.8
ROWS = (0, 1, 2)


def run_tree(drafter: str = "draft_model", rows: tuple[int, ...] = ROWS, **options: Any):
    """Texts and state of some prompts, each with its own seed."""
    seeds = sampling_of(SAMPLED, len(PROMPTS))
    sampling = jax.tree.map(lambda x: x[np.array(rows)], seeds)
    prompts = [PROMPTS[row] for row in rows]
    return generate(make_params(drafter, TREE), prompts, page_size=4, sampling=sampling, **options)


def started(drafter: str, max_lens: list[int] | None = None) -> tuple[EngineParams, EngineState]:
    """Parameters as in run_tree, and a state that has read the prompts."""
    params = make_params(drafter, TREE)
    limits = np.array(max_lens or [MAX_LENGTH] * 3, np.int32)
    empty, sampling = empty_state(params, 3, MAX_LENGTH, 4), sampling_of(SAMPLED, 3)
    state = admit_prompts(params, empty, PROMPTS[:3], sampling=sampling, max_lens=limits)
    return params, read_prompts(params, state)


def decode(params: EngineParams, state: EngineState, rounds: int) -> tuple[EngineState, Emitted]:
    """By the program of ``generate``: jit takes an argument left out for another one."""
    return jit_decode(params, state, rounds, max_rounds=NEW_TOKENS, shape=None, greedy=False)


@pytest.mark.parametrize("drafter", ["draft_model", slow("eagle3")])
def test_prompt_may_be_read_in_chunks(drafter: str):
    whole, whole_state = run_tree(drafter)
    for chunk in (1, 7):
        parts, state = run_tree(drafter, chunk=chunk)
        assert parts == whole
        accepted = state.rows.stats.accepted
        assert jnp.array_equal(accepted, whole_state.rows.stats.accepted), (
            "the same text, but the drafter guessed differently"
        )


def test_text_ends_at_the_first_stop_token():
    limits = [len(PROMPTS[row]) + 60 for row in ROWS]
    plain = [plain_texts(SAMPLED, 3)[row][: limits[row]] for row in ROWS]
    for stop in {plain[0][20], plain[1][31], plain[2][40]}:
        generated, state = run_tree(max_lens=limits, stop_token_ids=(stop,))
        assert generated == [cut_after(stop, plain[row], len(PROMPTS[row])) for row in ROWS]
        endings = [Ending.STOP if text[-1] == stop else Ending.LENGTH for text in generated]
        assert state.rows.ending.tolist() == endings
        assert not state.rows.active.any()


def cut_after(stop: int, text: list[int], prompt_length: int) -> list[int]:
    """``text`` up to its first generated ``stop``."""
    places = [i for i, token in enumerate(text) if token == stop and i >= prompt_length]
    return text[: places[0] + 1] if places else text


def test_text_ends_at_its_own_length_limit():
    limits = [len(PROMPTS[row]) + extra for row, extra in zip(ROWS, (1, 2, 37), strict=True)]
    generated, state = run_tree(max_lens=limits)
    assert generated == [plain_texts(SAMPLED, 3)[row][: limits[row]] for row in ROWS]
    assert state.rows.stats.rounds[0] == 0, "the only new token came with the prompt"
    assert state.rows.ending.tolist() == [Ending.LENGTH] * 3
    assert not state.rows.active.any()


def test_finished_rows_stay_as_they_are():
    done = np.array([0, 2])
    params, state = started("draft_model", [len(PROMPTS[0]) + 10, 150, len(PROMPTS[2]) + 3])
    before, _ = decode(params, state, 12)
    assert before.rows.active.tolist() == [False, True, False]
    after, emitted = decode(params, before, 5)
    assert after.rows.context_lens[1] > before.rows.context_lens[1]
    before, after, emitted = jax.device_get((before, after, emitted))  # numpy compiles nothing
    assert not emitted.counts[:, done].any()
    for old, new in zip(
        jax.tree.leaves(before.rows.replace(sampling=None)),
        jax.tree.leaves(after.rows.replace(sampling=None)),
        strict=True,
    ):
        assert np.array_equal(old[done], new[done])
    assert after.rows.sampling.drawn.tolist() == [False, True, False], "they cost no sampling"
    pages = before.rows.page_table[done]
    for old, new in zip(jax.tree.leaves(before.pool), jax.tree.leaves(after.pool), strict=True):
        assert np.array_equal(old[pages], new[pages])


@pytest.mark.parametrize("drafter", [slow("ngram"), "draft_model", slow("eagle3")])
def test_statistics_add_up(drafter: str):
    params, start = started(drafter)
    state, emitted = decode(params, start, 20)
    stats, added = state.rows.stats, state.rows.context_lens - start.rows.context_lens
    assert stats.rounds.tolist() == [20] * 3
    assert jnp.array_equal(stats.accepted.sum(axis=1), added)
    assert jnp.array_equal(stats.accepted[:, 0], stats.rounds)
    assert (np.diff(stats.accepted, axis=1) <= 0).all(), "reaching depth d takes reaching d - 1"
    most = stats.rounds * (TREE.num_nodes - 1)
    assert (stats.drafted == most).all() if drafter != "ngram" else (stats.drafted <= most).all()
    assert emitted.num_rounds == 20
    assert jnp.array_equal(emitted.counts.sum(axis=0), added)
    assert jnp.array_equal(emitted.drafted.sum(axis=0), stats.drafted)
    assert jnp.array_equal(emitted.accepted.sum(axis=0), stats.accepted[:, 1:].sum(axis=1))


def test_what_is_emitted_is_the_text():
    params, start = started("draft_model")
    start, (state, emitted) = jax.device_get((start, decode(params, start, 20)))
    for row in ROWS:
        new = [
            token
            for tokens, count in zip(emitted.tokens[:, row], emitted.counts[:, row], strict=True)
            for token in tokens[:count].tolist()
        ]
        first = int(start.rows.context_lens[row]) + 1
        assert new == state.rows.tokens[row, first : first + len(new)].tolist()
        assert len(new) == state.rows.context_lens[row] + 1 - first


# Other programs.


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_verify_width_does_not_change_float32_text(drafter: str):
    params = make_params(drafter, dataclasses.replace(TREE, verify_width=16))
    generated, _ = generate(params, PROMPTS[:3], sampling=sampling_of(0.0, 3))
    assert generated == plain_texts(0.0)[:3]


@pytest.mark.slow
@pytest.mark.parametrize("last", [0.0, 0.8], ids=["greedy program", "general program"])
@pytest.mark.parametrize("speculation", [SpeculationConfig.chain(3), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["eagle3", *LOOKUP])
def test_rejection_at_temperature_0_is_greedy(
    drafter: str, speculation: SpeculationConfig, last: float
):
    """The last row may sample, so that nothing of sampling is left out."""
    params = make_params(drafter, dataclasses.replace(speculation, acceptance="rejection"))
    sampling = sampling_of(0.0, 3).replace(temperature=jnp.array([0.0, 0.0, last]))
    generated, state = generate(params, PROMPTS[:3], sampling=sampling)
    greedy = 3 if last == 0 else 2
    assert generated[:greedy] == plain_texts(0.0)[:greedy]
    assert state.rows.stats.accepted.sum() > 1.2 * state.rows.stats.rounds.sum()
