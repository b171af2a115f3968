"""Log-probabilities of tokens, of their alternatives and of the prompt, against a plain pass."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import make_controls, make_sampling
from jaxspec.decoding.state import EngineState
from tests.helpers.marks import slow
from tests.helpers.programs import new_jit
from tests.helpers.random_models import CONFIG, empty_state, make_params, padded, random_prompts
from tests.helpers.sampling_reference import plain_logits

TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=3)
PROMPTS = random_prompts((11, 4, 7), seed=2)
LENS = np.array([len(prompt) for prompt in PROMPTS], np.int32)
LENGTH, WIDTH, TOP = 40, 5, 6
ASK = ("logprobs", "top_logprobs")

admit = new_jit(functional.admit)
prefill = new_jit(functional.prefill, "width", "controls", "prompt_logprobs", *ASK)
decode = new_jit(functional.decode, "max_rounds", "controls", *ASK)


def expected_at(state: EngineState, params: functional.EngineParams) -> np.ndarray:
    """log softmax of raw logits after every token of each row: [R, S, V]."""
    return np.asarray(jax.nn.log_softmax(plain_logits(params.target, state.rows.tokens)))


def check(expected: np.ndarray, token: int, own: Any, top_tokens: Any, top: Any) -> None:
    """One token's, against the log-probabilities [V] in its place."""
    np.testing.assert_allclose(own, expected[token], atol=1e-4)
    order = np.argsort(-expected, kind="stable")[: len(top_tokens)]
    np.testing.assert_array_equal(top_tokens, order)
    np.testing.assert_allclose(top, expected[order], atol=1e-4)


@pytest.mark.parametrize("drafter", [slow("ngram"), slow("eagle3")])
def test_they_are_those_of_the_raw_logits(drafter: str, monkeypatch: pytest.MonkeyPatch):
    """Also of the prompt, read in chunks and scored a few tokens at a time; with penalties on."""
    module = importlib.import_module("jaxspec.decoding.functional.prefill")
    monkeypatch.setattr(module, "SCORED_AT_ONCE", 6)  # two positions of three rows
    params = make_params(drafter, TREE)
    state = empty_state(params, 3, LENGTH, 4, controls=True)
    state = admit(
        params, state, np.arange(3), padded(PROMPTS, 16), LENS,
        sampling=make_sampling(3, temperature=np.array([0.0, 0.9, 0.9])),
        controls=make_controls(3, CONFIG.vocab_size, presence_penalty=1.0, prompt_lens=LENS),
    )  # fmt: skip
    ask: Any = {"controls": True, "logprobs": True, "top_logprobs": TOP}
    chunks = []
    for _ in range(3):
        start = np.asarray(state.rows.context_lens)
        state, emitted = prefill(params, state, width=WIDTH, prompt_logprobs=True, **ask)
        chunks.append((start, jax.device_get(emitted)))
    state, later = decode(params, state, 5, max_rounds=5, **ask)
    later, expected = jax.device_get(later), expected_at(state, params)
    tokens = np.asarray(state.rows.tokens)
    for row in range(3):
        seen = []  # prompt tokens that were scored
        for start, emitted in chunks:
            prompt = emitted.prompt
            for t in np.flatnonzero(prompt.valid[row]):
                place = int(start[row]) + int(t)  # of the token before
                seen.append(place + 1)
                own = (x[row, t] for x in (prompt.logprobs, prompt.top_tokens, prompt.top_logprobs))
                check(expected[row, place], tokens[row, place + 1], *own)
        assert seen == list(range(1, LENS[row]))
        place = int(LENS[row]) - 1
        for emitted in (*(emitted for _, emitted in chunks), later):
            for call, count in enumerate(emitted.counts[:, row]):
                for index in range(int(count)):
                    at = call, row, index
                    assert emitted.tokens[at] == tokens[row, place + 1]
                    own = (emitted.logprobs[at], emitted.top_tokens[at], emitted.top_logprobs[at])
                    check(expected[row, place], tokens[row, place + 1], *own)
                    place += 1
        assert place == state.rows.context_lens[row]


def test_what_is_not_asked_for_is_not_emitted():
    params = make_params("none", TREE)
    state = empty_state(params, 3, LENGTH, 4)
    _, emitted = jax.eval_shape(lambda state: functional.decode(params, state, 1), state)
    for name in ("logprobs", "top_tokens", "top_logprobs", "prompt"):
        assert getattr(emitted, name) is None
