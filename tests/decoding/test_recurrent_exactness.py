"""Gated delta layers beside attention, three to one: what test_hybrid_exactness.py and
test_families_under_load.py, which compare texts of whole families, do not test."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.cache.delta_rule import recurrence
from jaxspec.cache.recurrent import DeltaState
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import DraftModelDrafter, NGramDrafter, NoDrafter
from jaxspec.decoding.state import EngineState
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.mixers.gated_delta import gated_delta_shape
from jaxspec.parallel import Shards, make_mesh, mesh_layout
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import draft_model, random_prompts, random_target, tiny_config

DELTA = GatedDeltaConfig(num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=8, folded=8)
SPECULATIONS = {
    "chain": SpeculationConfig.chain(4),
    "tree": SpeculationConfig(num_nodes=12, max_depth=3, top_k=3),
}
PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 21, 1, 40))]
LONG = 4096  # tokens
SHAPES = (PLAIN, *map(TreeShape.parse, ("chain:1", "chain:3", "6:2:3", "8:3:2", "12:5:3")))


@functools.cache
def target(**changes: Any) -> Decoder:
    """Attention, then three recurrences that forget slowly."""
    config = tiny_config(num_layers=4, num_heads=8, **changes)
    first, *others = config.layers
    layers = [first, *(dataclasses.replace(one, mixer=DELTA) for one in others)]
    model = random_target(dataclasses.replace(config, layers=tuple(layers)), context=1.0)

    def slower(layer: Any) -> Any:
        if not isinstance(layer.mixer.config, GatedDeltaConfig):
            return layer
        return layer.replace(mixer=layer.mixer.replace(a_log=layer.mixer.a_log - 2))

    return model.replace(layers=tuple(map(slower, model.layers)))


@functools.cache
def params_of(drafter: str, shape: str) -> EngineParams:
    if drafter == "none":
        made, speculation = NoDrafter(), SpeculationConfig.chain(0)
    else:
        speculation, made = SPECULATIONS[shape], NGramDrafter(min_match=1)
        if drafter == "draft_model":
            made = DraftModelDrafter(model=draft_model(target()))
    return EngineParams(target=target(), drafter=made, speculation=speculation)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "shape"), [("none", "chain"), ("ngram", "tree")])
def test_samples_of_one_prompt_read_it_each(drafter: str, shape: str):
    """A row's pages do not hold its recurrences, so no other row may begin with them."""
    cache = CacheConfig(page_size=5, max_length=96)
    engine = Engine(params_of(drafter, shape), cache, EngineConfig(max_rows=3, rounds_per_call=4))
    one = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    together = dataclasses.replace(one, n=3)
    samples = engine.add_all([PROMPTS[1]] * 2, [together, one])
    engine.finish(samples)
    again = [dataclasses.replace(one, seed=3 + index) for index in range(3)]
    alone = engine.add_all([PROMPTS[1]] * 3, again)
    engine.finish(alone)
    assert not any(generation.error for generation in (*samples, *alone))
    found = [generation.token_ids for generation in samples]
    expected = [generation.token_ids for generation in alone]
    assert found == [*expected, expected[0]]
    assert len(set(map(tuple, expected))) == 3


def test_key_heads_that_cannot_be_split_are_refused():
    shards = Shards.over(make_mesh(8), mesh_layout(make_mesh(8)))
    with pytest.raises(ValueError, match="num_key_heads 4 cannot be split over 8 devices"):
        gated_delta_shape(DELTA, 32, jnp.dtype(jnp.float32), shards)


def test_sequences_that_devices_share_are_refused():
    params = on_mesh(params_of("none", "chain"), make_mesh(sequence_parallel=2))
    with pytest.raises(ValueError, match="need whole sequences on a device: take sp 1"):
        functional.init_state(params, 2, 32, page_size=4)


def round_text(shape: TreeShape | None) -> str:
    """What a GPU gets of a call of one round, before XLA."""
    params = params_of("ngram", "tree")
    state = jax.eval_shape(lambda: functional.init_state(params, 2, 64, page_size=4))

    def decode(params: EngineParams, state: EngineState) -> EngineState:
        return functional.decode(params, state, 1, max_rounds=1, shape=shape)[0]

    return jax.jit(decode).trace(params, state).lower(lowering_platforms=("cuda",)).as_text()


def test_rounds_stay_on_a_gpu_and_plain_ones_have_no_loop_in_a_layer():
    """One loop over the rounds; a tree adds one over depths in each recurrent layer."""
    plain_round, tree_round = round_text(PLAIN), round_text(None)
    assert "callback" not in plain_round + tree_round
    assert plain_round.count("stablehlo.while") == 1
    assert tree_round.count("stablehlo.while") == 1 + 3


def recurrent_states(state: EngineState) -> list[np.ndarray]:
    """Of the first row, with the tokens that wait in its window: [G, r, Dv, Dk] a layer."""
    length, found = int(state.rows.context_lens[0]), []
    assert length == len(PROMPTS[0]) + LONG - 1  # all but the root
    for layer in state.pool.target.layers:
        if isinstance(layer, DeltaState):
            held = length % layer.folded
            since = jax.tree.map(lambda x, held=held: x[:1, :held], layer.window)
            found.append(np.asarray(recurrence(layer.s[:1], since.k, since)[1][0]))
    return found


@pytest.mark.slow
def test_a_long_text_drafted_by_random_trees_is_that_of_plain_decoding():
    """A sampled text, which does not repeat itself, of many folds; the tree changes at random. Both
    engines end with the same recurrent states."""
    model = target(max_position=LONG + 64)
    cache = CacheConfig(page_size=64, max_length=LONG + 24)
    sampling = SamplingParams(max_tokens=LONG, temperature=0.8, seed=1)

    def serve(params: EngineParams, shapes: tuple[TreeShape, ...]) -> tuple[Any, ...]:
        engine = Engine(params, cache, EngineConfig(max_rows=1, rounds_per_call=8))
        generation, rng = engine.add(PROMPTS[0], sampling), np.random.default_rng(0)
        while not generation.done:
            engine.shape = shapes[rng.integers(len(shapes))]
            engine.step()
        assert not generation.error
        lengths = enumerate(generation.statistics.accepted)
        engine.finish([])
        states = recurrent_states(engine.programs.state)
        return generation.token_ids, Counter(dict(lengths)), states

    plain = EngineParams(target=model, drafter=NoDrafter(), speculation=SpeculationConfig.chain(0))
    drafter = DraftModelDrafter(model=draft_model(model))
    speculation = SpeculationConfig(num_nodes=12, max_depth=5, top_k=3)
    drafted = plain.replace(drafter=drafter, speculation=speculation)
    expected, _, plain_states = serve(plain, (PLAIN,))
    found, accepted, states = serve(drafted, SHAPES)
    assert found == expected and len(expected) == LONG
    assert accepted[1] > LONG / 16 and accepted[4] > 0, "hardly a draft was accepted"
    assert len(set(expected[-256:])) > 32
    assert len(states) == len(plain_states) == 3
    for own, other in zip(states, plain_states, strict=True):
        assert np.abs(other).max() > 0.1, "a state that is nearly empty cannot drift"
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-4)
