"""Texts of rows that are admitted at any time, of a target with any kind of layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec import functional
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import Drafter, NGramDrafter
from jaxspec.decoding.state import EngineState, Status
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from tests.helpers.programs import new_jit
from tests.helpers.random_models import CONFIG, padded, random_prompts, random_target

CAPACITY = SpeculationConfig(num_nodes=7, max_depth=3, top_k=2)
SHAPES = (None, TreeShape(3, 2), PLAIN)
PROMPTS = random_prompts((9, 3, 14, 6), seed=11)
ROWS, LENGTH, WIDTH = 2, 48, 4

admit, release = new_jit(functional.admit), new_jit(functional.release)
prefill = new_jit(functools.partial(functional.prefill, greedy=True), "width")
decode = new_jit(
    functools.partial(functional.decode, greedy=True), "max_rounds", "shape", "checked"
)


def with_mixer(mixer: Any, description: Any) -> Decoder:
    """A random target of attention, then a layer with this mixer and its config."""
    model, [first, second] = random_target(), CONFIG.layers
    layers = (model.layers[0], model.layers[1].replace(mixer=mixer))
    own = dataclasses.replace(second, mixer=description)
    config = dataclasses.replace(model.config, layers=(first, own))
    return model.replace(layers=layers, config=config)


def greedy_texts(target: Decoder) -> list[list[int]]:
    """Of PROMPTS, each token by a pass over all tokens before it that keeps nothing."""

    @jax.jit
    def following(tokens: Array) -> Array:
        places = jnp.arange(LENGTH)[None]
        hidden, _, _ = decoder.run(
            target, tokens[None], places, target.no_states(), dense_causal_attend
        )
        return jnp.argmax(decoder.logits(target, hidden)[0], axis=-1)

    results = []
    for prompt in PROMPTS:
        tokens = padded([prompt], LENGTH)[0]
        for place in range(len(prompt), LENGTH):
            tokens[place] = following(tokens)[place - 1]
        results.append(tokens.tolist())
    return results


def assert_rows_have_texts(target: Decoder, expected: list[list[int]]) -> None:
    """Rows are handed on from request to request, prompts read by index and in pieces, trees of any
    shape verified, at random."""
    params = EngineParams(target=target, drafter=NGramDrafter(), speculation=CAPACITY)
    state: EngineState = functional.init_state(params, ROWS, LENGTH, page_size=4)
    rng, waiting, accepted = np.random.default_rng(0), list(range(len(PROMPTS))), 0
    owner: list[int | None] = [None] * ROWS
    for _ in range(200):
        status = np.asarray(state.rows.status)
        for row, request in enumerate(owner):
            if request is not None and status[row] == Status.DONE:
                assert np.asarray(state.rows.tokens)[row].tolist() == expected[request]
                state, owner[row] = release(params, state, np.array([row])), None
            if owner[row] is None and waiting:
                owner[row] = request = waiting.pop()
                tokens, lens = padded([PROMPTS[request]], LENGTH), [len(PROMPTS[request])]
                state = admit(params, state, np.array([row]), tokens, np.array(lens))
        if owner == [None] * ROWS:
            break
        listed = rng.permutation([0, 1, -1, ROWS])[:2].astype(np.int32)
        counts = rng.integers(0, WIDTH + 1, 2).astype(np.int32)
        state, _ = prefill(params, state, listed, counts, width=WIDTH)
        shape = SHAPES[rng.integers(len(SHAPES))]
        state, emitted = decode(
            params, state, int(rng.integers(3)), max_rounds=2, shape=shape, checked=False
        )
        accepted += int(emitted.accepted.sum())
    assert owner == [None] * ROWS and not waiting, "requests that never end"
    assert accepted > 0, "this run tested little"


def drafted_texts(target: Decoder, drafter: Drafter) -> list[list[int]]:
    """Of PROMPTS, all at once."""
    params = EngineParams(target=target, drafter=drafter, speculation=CAPACITY)
    state = functional.init_state(params, len(PROMPTS), LENGTH, page_size=4)
    lens = np.array([len(prompt) for prompt in PROMPTS])
    state = admit(params, state, np.arange(len(PROMPTS)), padded(PROMPTS, LENGTH), lens)
    for _ in range(4):
        state, _ = prefill(params, state, width=WIDTH)
    state, emitted = decode(params, state, LENGTH, max_rounds=LENGTH, shape=None, checked=False)
    assert emitted.accepted.sum() > 0, "this run tested little"
    return np.asarray(state.rows.tokens).tolist()
