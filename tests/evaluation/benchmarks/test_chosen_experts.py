"""Experts that rounds read: what is counted on the device, beside a count by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.evaluation.benchmarks.ahead_of_time import Job, decode_program
from jaxspec.evaluation.benchmarks.chosen_experts import (
    ChosenExperts,
    can_count,
    chosen_experts,
    count_distinct,
    count_rounds,
    expected_choice,
    expected_of_a_layer,
)
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.rounds import Bench, Workload
from jaxspec.evaluation.benchmarks.shapes import model_shape
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.mlps import Experts
from jaxspec.parallel import WHOLE
from jaxspec.parallel.bytes import local_bytes
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.marks import slow

CONFIG, FLOAT32 = model_shape("tiny-experts", 2), jnp.dtype("float32")
EXPERTS, TOP_K, ROUNDS = 8, 2, 3


@functools.cache
def target() -> Decoder:
    return random_decoder(CONFIG, FLOAT32, None, 0)


def params_of(mode: str) -> EngineParams:
    head = None
    if mode != "plain":
        head = random_head(CONFIG, FLOAT32, None, seed=1, kind="mtp")
    return make_params(parse_mode(mode), target(), head, None, NO_KERNELS)


def filled_state(mode: str, batch: int, params: EngineParams) -> Any:
    """With prompts of 12 tokens, read."""
    prompts = np.random.default_rng(0).integers(1000, size=(batch, 12), dtype=np.int32)
    rows = np.arange(batch, dtype=np.int32)

    @jax.jit
    def filled(params: EngineParams) -> Any:
        """In one program: one by one the operations take longer."""
        state = functional.init_state(params, batch, 40, page_size=8)
        state = functional.admit(params, state, rows, prompts, np.full(batch, 12, np.int32))
        return functional.prefill(params, state, width=12, greedy=True)[0]

    return filled(params)


@jax.jit
def chosen_by_last(target: Decoder, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """The experts of token ``length - 1`` [layers, k], by router logits, without a cache."""
    positions = jnp.arange(tokens.shape[1])[None]
    how = target.config.layers, positions, dense_causal_attend, target.config.rms_norm_eps
    step, found = make_pass(*how, WHOLE, NO_KERNELS), []
    x = decoder.embed(target, tokens)
    for layer in target.layers:
        mixer: Any = layer.mixer
        mixed, _ = mixer(step.norm(x, layer.input_norm), None, step)
        x, normed = step.add_norm(x, mixed, layer.post_norm)
        assert isinstance(layer.mlp, Experts)
        scores = normed[0, length - 1] @ layer.mlp.router.weight
        found.append(jnp.argsort(scores)[-TOP_K:])
        x, _ = step.add_norm(x, layer.mlp(normed, step), None)
    return jnp.stack(found)


def count_by_hand(state: Any, emitted: Any) -> np.ndarray:
    """Distinct experts of each round and layer, node by node: [rounds, layers]."""
    read = [np.asarray(one)[:12].tolist() for one in state.rows.tokens]
    counts = []
    for index in range(ROUNDS):
        seen: list[set[int]] = [set() for _ in target().layers]
        for row, text in enumerate(read):
            tails = paths(emitted.trees, index, row)
            for tail in tails:
                whole, length = np.zeros((1, 40), np.int32), len(text) + len(tail)
                whole[0, :length] = text + tail
                chosen = chosen_by_last(target(), whole, length)
                for layer, experts in enumerate(np.asarray(chosen)):
                    seen[layer].update(experts.tolist())
            # Synthetic acceptance keeps what was drafted, whatever the text is.
            last = int(emitted.trees.path[index, row, emitted.accepted[index, row]])
            text += tails[last]
        counts.append([len(own) for own in seen])
    return np.asarray(counts)


def paths(trees: Any, index: int, row: int) -> list[list[int]]:
    """The tokens from the root to each node of a tree."""
    tokens, parents = (np.asarray(x[index, row]) for x in (trees.tokens, trees.parents))
    found: list[list[int]] = []
    for node in range(int(trees.num_nodes[index, row])):
        before = found[parents[node]] if node else []
        found.append([*before, int(tokens[node])])
    return found


@pytest.mark.parametrize(("mode", "batch"), [slow("plain", 3), slow("6:2:3@2", 2)])
def test_counted_experts_are_those_that_every_node_chooses(mode: str, batch: int):
    params = params_of(mode)
    assert can_count(params)
    state = filled_state(mode, batch, params)
    how = {"max_rounds": ROUNDS, "greedy": True}
    decode = jax.jit(functools.partial(functional.decode, trees=True, **how))
    _, emitted = decode(params, state, ROUNDS)
    count = jax.jit(functools.partial(count_rounds, rounds=ROUNDS, greedy=True))
    after, of_target, of_draft = count(params, state)
    expected = count_by_hand(state, emitted)
    assert np.array_equal(of_target, expected)
    steps = params.speculation.max_depth
    assert of_draft.shape == (ROUNDS, steps), "one layer in each pass"
    assert np.all(after.rows.context_lens == 12 + np.sum(np.asarray(emitted.counts), axis=0))
    means = chosen_experts(of_target, of_draft)
    assert means.of_a_layer == pytest.approx(expected.mean()) and len(means.draft) == steps


def test_padding_is_not_counted():
    """A chain of 3 that commits one token a round has one token to read in each pass of the head,
    the first of which has room for four."""
    params = params_of("chain:3@1")
    count = jax.jit(functools.partial(count_rounds, rounds=ROUNDS, greedy=True))
    _, _, of_draft = count(params, filled_state("chain:3@1", 1, params))
    assert np.array_equal(of_draft, np.full((ROUNDS, 3), TOP_K))


def test_distinct_numbers_are_counted():
    values = jnp.asarray([[3, 1], [3, 7], [9, 8]], jnp.int32)
    assert int(count_distinct(values, 8)) == 3, "what is not below 8 is nothing"


@pytest.mark.parametrize("mode", ["plain", "chain:3"])
def test_the_floor_takes_what_was_counted(mode: str):
    params = params_of(mode)
    independent, counted = (
        floor_bytes(params, batch=5, context=100, chosen=chosen)
        for chosen in (None, ChosenExperts((3.5, 4.5), (2.0, 3.0, 4.0)))
    )
    mlp: Any = target().layers[0].mlp
    expert = local_bytes((mlp.gate_up, mlp.down)) / EXPERTS
    tokens = 5 if mode == "plain" else 20
    expected = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    assert expected_choice(mlp, tokens) == pytest.approx(expected)
    assert expected_of_a_layer(target(), tokens) == pytest.approx(expected)
    fewer = independent.target_weights - counted.target_weights
    assert fewer == pytest.approx(expert * (2 * expected - 8), abs=2)
    fewer = independent.draft_weights - counted.draft_weights
    of_five = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 5)
    assert fewer == pytest.approx(0 if mode == "plain" else expert * (3 * of_five - 9), abs=2)


def test_a_model_without_experts_is_not_counted():
    config = model_shape("tiny", 1)
    target = random_decoder(config, FLOAT32, None, 0)
    params = make_params(parse_mode("plain"), target, None, None, NO_KERNELS)
    bench = Bench(parse_mode("plain"), params, Workload(1, 8, 2, 8, 1))
    assert not can_count(params) and bench.count_experts(print) is None
    assert expected_of_a_layer(target, 4) is None


def test_counting_is_lowered_for_gpus():
    """Of Qwen3-30B-A3B's layers, with the MTP layer of a model that has none."""
    workload = Workload(batch=2, context=64, rounds=2, page_size=16, repeats=1)
    config = model_shape("qwen3-30b-a3b", 1)
    job = Job(config, parse_mode("chain:3"), workload, kernels="none", head="mtp")
    params, state, *_ = decode_program(job, jax.devices()).arguments
    count = jax.jit(functools.partial(count_rounds, rounds=2, greedy=True))
    lowered = count.trace(params, state).lower(lowering_platforms=("cuda",))
    counts: Any = lowered.out_info
    assert [x.shape for x in counts[1:]] == [(2, 1), (2, 3)]
    assert "128x2048x2x768xbf16" in lowered.as_text()
