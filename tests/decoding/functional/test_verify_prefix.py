"""verify_prefix: a draft changes nothing but how the text is computed."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import functional
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import make_controls, make_sampling
from jaxspec.decoding.state import Ending, EngineState, Status
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import make_mesh
from tests.decoding.test_family_exactness import target as family_target
from tests.helpers.layouts import on_mesh
from tests.helpers.programs import new_jit, traces
from tests.helpers.random_models import (
    make_drafter,
    padded,
    random_prompts,
    random_target,
    tiny_config,
)

CHAIN = SpeculationConfig.chain(2)
PROMPTS = random_prompts((5, 17, 1, 9), seed=3)
LENS = np.array([len(prompt) for prompt in PROMPTS])
ROWS, NEW, LENGTH, PAGE = len(PROMPTS), 24, 48, 4
SAMPLING = make_sampling(
    ROWS,
    temperature=np.array([0.0, 0.9, 1.1, 0.7]),
    top_p=np.array([1, 0.9, 1, 1]),
    top_k=np.array([0, 0, 20, 0]),
    seeds=np.arange(4),
)
PENALTIES = make_controls(
    ROWS, 96, repetition_penalty=np.array([1, 1.3, 1, 1]), presence_penalty=0.5
)
CHOICES = ("width", "greedy", "controls", "logprobs", "top_logprobs", "policy_logprobs")

admit = new_jit(functional.admit, "may_wait")
release, assign_pages = new_jit(functional.release), new_jit(functional.assign_pages)
prefill_all, verify = (
    new_jit(functional.prefill_all, *CHOICES),
    new_jit(functional.verify_prefix, *CHOICES),
)
decode = new_jit(functional.decode, "max_rounds", *CHOICES[1:])


@functools.cache
def recurrent_target() -> Decoder:
    """Attention, then a recurrence that folds four tokens at a time."""
    delta = GatedDeltaConfig(num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=8, folded=4)
    config = tiny_config(num_heads=8)
    first, second = config.layers
    layers = (first, dataclasses.replace(second, mixer=delta))
    return random_target(dataclasses.replace(config, layers=layers), context=1.0)


@functools.cache
def params_of(kind: str) -> EngineParams:
    """``kind``: a drafter of a dense target, "recurrent", or a family."""
    target, drafter = random_target(), kind
    if kind == "recurrent":
        target, drafter = recurrent_target(), "none"
    elif kind in ("gemma3_text", "glm4_moe_lite"):
        target, drafter = family_target(kind), "ngram"
    return EngineParams(target=target, drafter=make_drafter(drafter, target), speculation=CHAIN)


def admitted(params: EngineParams, **options: Any) -> EngineState:
    """A state whose rows have prompts; ``options`` are admit's."""
    state = functional.init_state(
        params, ROWS, LENGTH, page_size=PAGE, controls="controls" in options
    )
    options = {"sampling": SAMPLING, "max_lens": LENS + NEW} | options
    return admit(params, state, np.arange(ROWS), padded(PROMPTS, LENGTH), LENS, **options)


def texts(state: EngineState) -> list[list[int]]:
    """The new tokens of each row."""
    tokens, ends = np.asarray(state.rows.tokens), np.asarray(state.rows.context_lens) + 1
    return [row[start:end].tolist() for row, start, end in zip(tokens, LENS, ends, strict=True)]


def plain(params: EngineParams, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """Texts without a draft, and what their calls emitted."""
    state, first = read_with(params, admitted(params, **options), [[]] * ROWS, **options)
    state, rest = decoded(params, state, **options)
    assert set(np.asarray(state.rows.status)) == {Status.DONE}
    return texts(state), [first, rest]


def read_with(
    params: EngineParams,
    state: EngineState,
    drafts: list[list[int]],
    width: int = 8,
    **options: Any,
) -> tuple[EngineState, Any]:
    lens = np.array([len(draft) for draft in drafts], np.int32)
    table = padded([np.array(draft, np.int32) for draft in drafts], NEW)
    return verify(params, state, None, table, lens, width=width, **scores(options))


def decoded(params: EngineParams, state: EngineState, **options: Any) -> tuple[EngineState, Any]:
    return decode(params, state, NEW, max_rounds=NEW, **scores(options))


def scores(options: dict[str, Any]) -> dict[str, bool]:
    """Options of programs for rows that were admitted with ``options``."""
    controls = "controls" in options
    return {"controls": controls, "logprobs": True, "policy_logprobs": not controls}


def agreeing(draft: list[int], text: list[int]) -> int:
    pairs = zip(draft, text, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(text)))


def assert_same(
    params: EngineParams,
    drafts: list[list[int]],
    expected: list[list[int]],
    width: int = 8,
    **options: Any,
) -> Any:
    state, emitted = read_with(params, admitted(params, **options), drafts, width, **options)
    read = jax.tree.map(np.asarray, state.rows)
    end, _ = decoded(params, state, **options)
    assert texts(end) == expected
    kept = np.asarray(emitted.accepted)[0].tolist()
    most = [min(len(draft), NEW - 1) for draft in drafts]
    assert kept == [
        agreeing(draft[:end], text) for draft, text, end in zip(drafts, expected, most, strict=True)
    ]
    for row, count in enumerate(np.asarray(emitted.counts)[0]):
        assert np.asarray(emitted.tokens)[0, row, :count].tolist() == expected[row][:count]
        assert read.context_lens[row] == LENS[row] + count - 1
        assert count == min(kept[row] + 1, len(expected[row]))
    assert read.prompt_lens.tolist() == LENS.tolist()
    return emitted


def edited(expected: list[list[int]]) -> list[list[int]]:
    """An untouched text, one with another token in its middle, none, and one of another length."""
    first, second, _, last = expected
    other = [*second[:11], (second[11] + 1) % 96, *second[12:]]
    return [first, other, [], [*last[:3], 500, *last[3:]][:NEW]]


@functools.cache
def plain_eagle3() -> tuple[list[list[int]], list[Any]]:
    return plain(params_of("eagle3"))


def test_texts_equal_those_without_a_draft() -> None:
    params, (expected, [first, rest]) = params_of("eagle3"), plain_eagle3()
    state, other = prefill_all(params, admitted(params), None, width=8, **scores({}))
    assert texts(decoded(params, state)[0]) == expected  # without verify_prefix
    np.testing.assert_array_equal(other.tokens, first.tokens[:, :, :1])
    emitted = assert_same(params, edited(expected), expected)
    assert np.asarray(emitted.drafted)[0].tolist() == [23, 16, 0, 3]  # to the end of its chunk
    for row, count in enumerate(np.asarray(emitted.counts)[0]):
        made = np.arange(1 + CHAIN.max_depth) < np.asarray(rest.counts)[:, row, None]
        for name in ("logprobs", "policy_logprobs"):
            before, later, got = (np.asarray(getattr(x, name)) for x in (first, rest, emitted))
            wanted = [before[0, row, 0], *later[:, row][made]]
            np.testing.assert_allclose(got[0, row, :count], wanted[:count], atol=2e-5)


def test_the_drafter_goes_on_as_after_a_prompt() -> None:
    params, (expected, _) = params_of("eagle3"), plain_eagle3()
    state, emitted = read_with(params, admitted(params), edited(expected))
    kept = np.asarray(emitted.counts)[0] - 1
    kept[0] = 3  # it is done: its prompt alone is compared
    prompts = [
        [*prompt, *text[:n]] for prompt, text, n in zip(PROMPTS, expected, kept, strict=True)
    ]
    lens = LENS + kept
    other = functional.init_state(params, ROWS, LENGTH, page_size=PAGE, controls=False)
    table = padded([np.array(each, np.int32) for each in prompts], LENGTH)
    other = admit(
        params, other, np.arange(ROWS), table, lens, sampling=SAMPLING, max_lens=LENS + NEW
    )
    other, _ = prefill_all(params, other, None, width=8, **scores({}))
    (state, got), (other, wanted) = decoded(params, state), decoded(params, other)
    assert texts(state) == texts(other) == expected
    np.testing.assert_array_equal(got.accepted[:, 1:], wanted.accepted[:, 1:])
    assert np.asarray(got.accepted).sum() > 8


def test_stop_tokens_and_limits_end_a_draft() -> None:
    params, (expected, _) = params_of("eagle3"), plain_eagle3()
    stops = np.full((ROWS, 2), -1)
    stops[:2, 0] = expected[0][9], expected[1][4]
    limits = LENS + np.array([NEW, NEW, 7, NEW])
    options = {"stop_token_ids": stops, "max_lens": limits}
    cut = [
        expected[0][: expected[0].index(expected[0][9]) + 1],
        expected[1][: expected[1].index(expected[1][4]) + 1],
        expected[2][:7],
        expected[3],
    ]
    state, emitted = read_with(params, admitted(params, **options), expected)
    assert texts(state)[:3] == cut[:3]
    assert np.asarray(state.rows.ending).tolist() == [
        *(Ending.STOP, Ending.STOP, Ending.LENGTH, Ending.LENGTH)
    ]
    np.testing.assert_array_equal(emitted.counts[0], [len(text) for text in cut])
    assert np.asarray(emitted.accepted)[0, :3].tolist() == [len(cut[0]), len(cut[1]), 6]


def test_only_pages_of_the_row_and_past_the_cached_ones_are_written() -> None:
    """Rows of which the first pages hold their prompts, and that have pages for a short draft."""
    params, (expected, _) = params_of("eagle3"), plain_eagle3()
    state, _ = prefill_all(params, admitted(params), None, width=8, **scores({}))
    before, table = np.asarray(state.rows.page_table), np.asarray(state.rows.page_table).copy()
    state = release(params, state, np.arange(ROWS))
    cached, held = LENS // PAGE * PAGE, LENS // PAGE + 2  # pages: a few tokens of the draft fit
    for row, pages in enumerate(held):
        table[row, pages:] = 0
    pools = jax.tree.map(np.asarray, (state.pool.target.layers, state.pool.draft.layers))
    state = admit(
        params,
        state,
        np.arange(ROWS),
        padded(PROMPTS, LENGTH),
        LENS,
        sampling=SAMPLING,
        max_lens=LENS + NEW,
        page_table=table,
        cached_lens=cached,
        may_wait=True,
    )
    state, emitted = read_with(params, state, expected)
    after = jax.tree.map(np.asarray, (state.pool.target.layers, state.pool.draft.layers))
    mine = {page for row in range(ROWS) for page in table[row, cached[row] // PAGE : held[row]]}
    others = sorted(set(range(1, state.pool.num_pages)) - mine)
    for old, new in zip(jax.tree.leaves(pools), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[others], new[others])
    np.testing.assert_array_equal(emitted.drafted[0], held * PAGE - LENS)
    state = assign_pages(params, state, np.arange(ROWS), before)
    assert texts(decoded(params, state)[0]) == expected


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_edit_of_an_old_text_gives_the_same_text(data: st.DataObject) -> None:
    params, (expected, _) = params_of("eagle3"), plain_eagle3()
    drafts = []
    for text in expected:
        draft = text[: data.draw(st.integers(0, NEW))]
        edits = st.tuples(st.integers(0, NEW - 1), st.integers(0, 95), st.booleans())
        for place, token, inserts in data.draw(st.lists(edits, max_size=2)):
            draft[place : place + (not inserts)] = [token]
        drafts.append(draft[:NEW])
    assert_same(params, drafts, expected)


def test_two_policies_share_one_program() -> None:
    params, (expected, _) = params_of("eagle3"), plain_eagle3()
    before = traces(verify)
    assert_same(params.replace(target=params.target.replace()), edited(expected), expected)
    assert traces(verify) == before


@pytest.mark.parametrize(
    ("drafts", "lens", "message"),
    [
        (np.zeros((ROWS, 3), np.float32), [0] * ROWS, "drafts must be integers"),
        (np.zeros((2, 3), np.int32), [0] * ROWS, "drafts has 2 rows for 4"),
        (np.zeros((ROWS, 3), np.int32), [0, 0, 4, 0], "draft_lens.2. is 4: drafts have 3"),
    ],
)
def test_bad_drafts_are_refused(drafts: Any, lens: Any, message: str) -> None:
    params = params_of("eagle3")
    with pytest.raises(ValueError, match=message):
        functional.verify_prefix(params, admitted(params), None, drafts, lens, width=8)


def test_another_rule_than_match_is_refused() -> None:
    params = params_of("ngram")
    params = params.replace(speculation=dataclasses.replace(CHAIN, acceptance="rejection"))
    with pytest.raises(ValueError, match='needs the acceptance rule "match"'):
        functional.verify_prefix(params, admitted(params), None, [[1]] * ROWS, [1] * ROWS, width=8)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize(
    "kind",
    ["ngram", "mtp3", "mixed", "draft_model", "recurrent", "gemma3_text", "glm4_moe_lite"],
)
def test_texts_of_other_kinds(kind: str, width: int) -> None:
    params = params_of(kind)
    expected, _ = plain(params)
    assert_same(params, edited(expected), expected, width)


@pytest.mark.slow
def test_penalties_see_the_draft() -> None:
    params = params_of("ngram")
    expected, _ = plain(params, controls=PENALTIES)
    assert expected != plain(params)[0]
    for width in (8, 40):
        assert_same(params, edited(expected), expected, width, controls=PENALTIES)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"data_parallel": 2}], ids=str)
def test_texts_on_a_mesh(sizes: dict[str, Any]) -> None:
    params, (expected, _) = params_of("eagle3"), plain_eagle3()
    assert_same(on_mesh(params, make_mesh(**sizes)), edited(expected), expected)
