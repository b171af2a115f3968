"""verify_prefix: a draft changes nothing but how the text is computed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import functional
from jaxspec.config.mixers import GatedDeltaConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import make_controls, make_sampling
from jaxspec.decoding.state import Ending, EngineState, Status
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.decoding.test_family_exactness import target as family_target
from tests.helpers.marks import slow
from tests.helpers.programs import new_jit, traces
from tests.helpers.random_models import (
    make_drafter,
    padded,
    random_prompts,
    random_target,
    tiny_config,
)

CHAIN = SpeculationConfig.chain(3)
PROMPTS = random_prompts((5, 17, 1, 9), seed=3)
LENS = np.array([len(prompt) for prompt in PROMPTS])
ROWS, NEW, LENGTH, PAGE = len(PROMPTS), 24, 48, 4
SAMPLING = make_sampling(
    ROWS, temperature=[0.0, 0.9, 1.1, 0.7], top_p=[1, 0.9, 1, 1], top_k=[0, 0, 20, 0], seeds=range(4)
)
PENALTIES = make_controls(ROWS, 96, repetition_penalty=[1.0, 1.3, 1.0, 1.0], presence_penalty=0.5)
CHOICES = ("width", "greedy", "controls", "logprobs", "top_logprobs")

admit = new_jit(functional.admit)
prefill_all, verify = new_jit(functional.prefill_all, *CHOICES), new_jit(
    functional.verify_prefix, *CHOICES
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
        target, drafter = recurrent_target(), "ngram"
    elif kind in ("gemma3_text", "deepseek_v3"):
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
    return [
        row[start:end].tolist() for row, start, end in zip(tokens, LENS, ends, strict=True)
    ]


def plain(params: EngineParams, **options: Any) -> tuple[list[list[int]], Any]:
    """Texts without a draft, and their log-probabilities [ROWS, NEW]."""
    controls = {"controls": "controls" in options}
    state, first = prefill_all(
        params, admitted(params, **options), None, width=8, logprobs=True, **controls
    )
    state, rest = decode(params, state, NEW, max_rounds=NEW, logprobs=True, **controls)
    assert set(np.asarray(state.rows.status)) == {Status.DONE}
    return texts(state), [first, rest]


def verified(
    params: EngineParams, drafts: list[list[int]], width: int = 8, **options: Any
) -> tuple[EngineState, Any, EngineState]:
    """The state after the drafts were read, what that emitted, and the state at the end."""
    controls = {"controls": "controls" in options}
    lens = np.array([len(draft) for draft in drafts], np.int32)
    table = padded([np.array(draft, np.int32) for draft in drafts], NEW)
    state = admitted(params, **options)
    state, emitted = verify(
        params, state, None, table, lens, width=width, logprobs=True, **controls
    )
    read = jax.tree.map(np.asarray, state.rows)
    end, _ = decode(params, state, NEW, max_rounds=NEW, logprobs=True, **controls)
    return read, emitted, end


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
    read, emitted, end = verified(params, drafts, width, **options)
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


@pytest.mark.parametrize("kind", ["eagle3", "recurrent"])
def test_texts_equal_those_without_a_draft(kind: str) -> None:
    params = params_of(kind)
    expected, scores = plain(params)
    emitted = assert_same(params, edited(expected), expected)
    assert np.asarray(emitted.drafted)[0].tolist() == [23, 16, 0, 3]  # to the end of its chunk
    first, rest = scores
    for row, count in enumerate(np.asarray(emitted.counts)[0]):
        later = np.asarray(rest.logprobs)[:, row][
            np.arange(4) < np.asarray(rest.counts)[:, row, None]
        ]
        all_scores = [np.asarray(first.logprobs)[0, row, 0], *later]
        got = np.asarray(emitted.logprobs)[0, row, :count]
        np.testing.assert_allclose(got, all_scores[:count], atol=2e-5)
