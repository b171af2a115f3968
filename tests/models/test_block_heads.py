"""Block heads compute the published equations, whatever pages and chunks the context came in."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import functional
from jaxspec.checkpoints.block import save_block_head
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import BlockDrafter, block
from jaxspec.decoding.drafters.block import block_attend
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead
from jaxspec.models.json.values import read_json
from tests.helpers.block_heads import (
    KINDS,
    arrays_equal,
    block_params,
    block_target,
    random_head,
    with_confidence,
)
from tests.helpers.block_reference import block_outputs, confidence, markov_logits
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_decode,
    random_prompts,
    read_prompts,
    texts,
    tiny_config,
)

TARGET = block_target(tiny_config(num_layers=3))
PROMPTS = random_prompts((5, 21, 30))
DEPTH = 4  # less deep than the block
jit_catch_up = jax.jit(functional.catch_up, compiler_options=FAST_COMPILE)


def params_of(kind: str) -> EngineParams:
    head = random_head(TARGET.config, kind, capture=(0, 2))
    drafter = BlockDrafter(head=with_confidence(head) if kind == "dspark" else head)
    return EngineParams(target=TARGET, drafter=drafter, speculation=SpeculationConfig.chain(DEPTH))


def head_of(params: EngineParams) -> BlockHead:
    assert isinstance(params.drafter, BlockDrafter)
    return params.drafter.head


def drafted(params: EngineParams, state: EngineState) -> np.ndarray:
    """Logits [R, DEPTH, V] of the next block of every row, without the Markov head's.

    The pages hold the whole context: see functional.catch_up.
    """

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(params: Any, state: EngineState) -> jax.Array:
        head = params.drafter.head
        block = head.block(state.rows.roots, DEPTH)
        attend = block_attend(state, block.shape[1], head.causal)
        states = state.pool.draft.layers
        outputs, _ = head.outputs(params.target, block, attend.positions, states, attend)
        return head.logits(params.target, outputs)

    return np.asarray(run(params, state))


def captured(tokens: np.ndarray, capture: tuple[int, ...]) -> np.ndarray:
    """The target's hidden states [R, S, C] at tokens [R, S], without a cache."""

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(target: Decoder, tokens: jax.Array) -> jax.Array | None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        none = target.no_states()
        return decoder.run(target, tokens, positions, none, dense_causal_attend, capture)[2]

    return np.asarray(run(TARGET, jnp.asarray(tokens)))


@pytest.mark.parametrize(
    ("kind", "page_size", "chunk"),
    [
        ("dflash", 7, 5),
        slow("dspark", 7, 5),
        slow("dflash2", 7, 5),
        slow("dflash2", 16, 32),
        slow("dflash", 1, 32),
        slow("dspark", 16, 3),
        slow("dflash", 64, 1),
    ],
)
def test_logits_are_those_of_the_published_equations(
    kind: str, page_size: int, chunk: int, tmp_path: Path
):
    params = params_of(kind)
    state = admit_prompts(params, empty_state(params, 3, 64, page_size), PROMPTS)
    state = read_prompts(params, state, chunk, greedy=True)
    state, emitted = jit_decode(params, state, 5, max_rounds=5, shape=None, greedy=True)
    assert emitted.num_rounds == 5
    assert TARGET.lm_head is not None
    lm_head = np.asarray(TARGET.lm_head.weight, np.float64)
    outputs = published_outputs(params, state, tmp_path)
    settled = jit_catch_up(params, state, jnp.arange(3))
    for logits, theirs in zip(drafted(params, settled), outputs @ lm_head, strict=True):
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-4)


def published_outputs(params: EngineParams, state: EngineState, folder: Path) -> np.ndarray:
    """Outputs [R, DEPTH, H] of the next block of every row, by the equations. The head is written
    to the folder."""
    head = head_of(params)
    save_block_head(head, folder, TARGET)
    tensors, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    tokens, sizes = np.asarray(state.rows.tokens), np.asarray(state.rows.context_lens)
    states, embed = captured(tokens, head.capture), np.asarray(TARGET.embed)
    outputs = [
        block_outputs(tensors, config, embed, states[row, :size], int(tokens[row, size]), DEPTH)
        for row, size in enumerate(sizes)
    ]
    return np.stack(outputs)


@pytest.mark.parametrize("kind", ["dflash", slow("dspark")])
def test_a_block_and_its_context_are_read_as_if_one_after_the_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """The same tree and pages, whether the pass of a block writes its context, or one before it; in
    a row that does not decode, nothing is written and all stays pending."""
    params = params_of(kind)
    state = admit_prompts(params, empty_state(params, 3, 64, 7), PROMPTS)
    state = read_prompts(params, state, 32, greedy=True)
    plain = SpeculationConfig.chain(0).shape
    state, _ = jit_decode(params, state, 3, max_rounds=5, shape=plain, greedy=True)
    assert state.rows.draft.pending.tolist() == [3, 3, 3]
    waiting = state.replace(
        rows=state.rows.replace(context_capacity=state.rows.context_capacity.at[1].set(0))
    )

    def proposed() -> Any:
        options = dataclasses.replace(params.round_options(), greedy=True)
        run = jax.jit(
            lambda params, state: params.drafter.propose(params.target, state, options),
            compiler_options=FAST_COMPILE,
        )
        return run(params, waiting)

    tree, draft = proposed()
    monkeypatch.setattr(block, "MOST_BESIDE", 0)
    other_tree, other_draft = proposed()
    assert arrays_equal(tree.tokens[::2], other_tree.tokens[::2])
    assert arrays_equal(draft.rows, state.rows.draft)
    assert_same_pages(draft.pool, other_draft.pool)
    drafted_state = waiting.replace(pool=waiting.pool.replace(draft=draft.pool))
    entries = zip(context_entries(waiting), context_entries(drafted_state), strict=True)
    changed = [not np.array_equal(before, after) for before, after in entries]
    assert changed == [True, False, True] * (len(changed) // 3)
    caught_up = jit_catch_up(params, waiting, jnp.arange(3))
    assert caught_up.rows.draft.pending.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["ngram+dflash", slow("dflash"), slow("dspark")])
def test_after_calls_of_any_shape_the_pages_are_those_of_the_whole_text(kind: str):
    """Plain calls, also of more rounds than the pending tokens have room for, and smaller trees."""
    params = block_params(kind, SpeculationConfig.chain(DEPTH))
    state = admit_prompts(params, empty_state(params, 3, 80, 7), PROMPTS)
    state = read_prompts(params, state, greedy=True)
    whole, plain, small = (SpeculationConfig.chain(depth).shape for depth in (DEPTH, 0, 2))
    for shape, rounds in ((whole, 2), (small, 1), (plain, DEPTH + 3), (whole, 1), (plain, 2)):
        state, _ = jit_decode(params, state, rounds, max_rounds=8, shape=shape, greedy=True)
    assert (state.rows.draft.pending > 0).all()
    assert (state.rows.stats.accepted[:, 1] > 0).any(), "no draft was accepted"
    settled = jit_catch_up(params, state, jnp.arange(3))
    contexts = [np.array(text[:-1]) for text in texts(state)]
    read = admit_prompts(params, empty_state(params, 3, 80, 7), contexts)
    read = read_prompts(params, read, greedy=True)
    for ours, theirs in zip(*(context_entries(x) for x in (settled, read)), strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def context_entries(state: EngineState) -> list[np.ndarray]:
    """The drafter's keys and values [G, n, D] of each row's context, layer by layer."""
    lengths, found = state.rows.context_lens.tolist(), []
    for pages in jax.tree.leaves(state.pool.draft.layers):  # [P, G, K, D]
        for table, length in zip(np.asarray(state.rows.page_table), lengths, strict=True):
            own = np.asarray(pages)[table].swapaxes(0, 1)
            found.append(own.reshape(own.shape[0], -1, own.shape[-1])[:, :length])
    return found


def assert_same_pages(ours: Any, theirs: Any) -> None:
    """Pages but the null page: padding is written there."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one[1:], other[1:], rtol=0, atol=1e-5)


def test_the_confidence_is_that_of_the_published_equations(tmp_path: Path):
    params = params_of("dspark")
    state = admit_prompts(params, empty_state(params, 3, 64, 7), PROMPTS)
    state = read_prompts(params, state, 5, greedy=True)
    decode = jax.jit(
        functools.partial(functional.decode, confidence=True, trees=True, greedy=True),
        static_argnames="max_rounds",
        compiler_options=FAST_COMPILE,
    )
    # Two rounds of one call, the second of them after the first alone.
    _, emitted = decode(params, state, 2, max_rounds=2)
    assert emitted.confidence is not None and emitted.trees is not None
    for index in range(2):
        outputs = published_outputs(params, state, tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        drafts = np.asarray(emitted.trees.tokens[index])  # [R, 1 + DEPTH], chains
        for row, ours in enumerate(emitted.confidence[index]):
            theirs = confidence(tensors, outputs[row], drafts[row, :-1].tolist())
            assert np.ptp(theirs) > 0.01, "of another at each depth"
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        state, _ = decode(params, state, 1, max_rounds=2)


def test_the_markov_head_is_that_of_the_published_equations(tmp_path: Path):
    params = params_of("dspark")
    head = head_of(params)
    save_block_head(head, tmp_path, TARGET)
    tensors = load_file(tmp_path / "model.safetensors")
    assert head.markov is not None
    ours = head.markov.bias(TARGET, jnp.array([[3, 95], [0, 17]]))  # [2, 2, V]
    for place, token in (((0, 0), 3), ((0, 1), 95), ((1, 0), 0), ((1, 1), 17)):
        np.testing.assert_allclose(ours[place], markov_logits(tensors, token), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_the_last_token_and_masks(kind: str):
    head = random_head(TARGET.config, kind)
    block = head.block(jnp.array([4, 7]), 3)
    masks = [95] * (2 if kind == "dspark" else 3)
    assert block.tolist() == [[4, *masks], [7, *masks]]
    assert head.max_depth == (6 if kind == "dspark" else 5)
    with pytest.raises(ValueError, match="choose one of at most"):
        head.check_depth(7)
