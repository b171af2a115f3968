"""Every kind of request on a mesh of devices, with every tree: the text that it has on one."""

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.parallel import TensorParallel, make_mesh
from jaxspec.scheduling.round_costs import LearntCosts, RoundCosts
from tests.helpers.engines import FULL, seal
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params, random_prompts, random_target, tiny_config
from tests.helpers.small_tokenizers import one_token_a_byte

VOCAB, END = 257, 256  # a byte each, and the end; two devices pad the vocabulary
TARGET = random_target(tiny_config(vocab_size=VOCAB, stop_token_ids=(END,)))
CHAIN, CACHE = SpeculationConfig.chain(2), CacheConfig(page_size=8, max_length=64)
SHAPES = (PLAIN, TreeShape.parse("chain:1"), CHAIN.shape)

DIGITS = StructuredOutput(regex="[0-9]{4}(, [a-d]{3}){2}")
SCHEMA = StructuredOutput(
    json_schema={"type": "array", "items": {"enum": [1, 22, "x"]}, "maxItems": 3}, whitespace=False
)
SAMPLING = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=40, structured=DIGITS),
    SamplingParams(
        max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={70: 4.0}
    ),
    SamplingParams(max_tokens=40, temperature=0.9, seed=4, structured=SCHEMA, logit_bias={50: 2.0}),
    SamplingParams(
        max_tokens=24, temperature=0.8, seed=2, presence_penalty=0.7, bad_token_ids=(9, 256)
    ),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=5, min_tokens=20,
                   allowed_token_ids=tuple(range(60, 90)), stop_token_ids=(61, 62, 63)),
]  # fmt: skip
PROMPTS = [
    prompt.tolist() for prompt in random_prompts((5, 9, 17, 3, 11, 12, 8), seed=6, vocab=256)
]


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(one_token_a_byte({"<end>": END}).to_str(), VOCAB, [END])


def new_engine(
    drafter: str, model: TensorParallel = 1, data: int = 1, sequence: int = 1, **options: Any
) -> Engine:
    params = make_params(drafter, CHAIN, TARGET)
    if (model, data, sequence) != (1, 1, 1):
        mesh = make_mesh(model, data, sequence_parallel=sequence)
        params = on_mesh(params, mesh, shard_drafter=False)
    options = {"max_rows": 4, "rounds_per_call": 4} | options
    config = EngineConfig(**options)
    return Engine(params, CACHE, config, make_matcher=lambda own: compiler().matcher(own))


def sealed(engine: Engine) -> Engine:
    """With programs that serve all requests, so that few are compiled."""
    seal(engine, dataclasses.replace(FULL, structured=DIGITS))
    return seal(engine, FULL)


def run(engine: Engine, change: Any = None) -> list[Generation]:
    generations = engine.add_all(PROMPTS, SAMPLING)
    engine.finish(generations, on_step=change)
    assert not any(generation.error for generation in generations)
    return generations


@functools.cache
def expected() -> list[Generation]:
    """Plain decoding on one device, one request after the other."""
    found = run(sealed(new_engine("none", max_rows=1)))
    reasons = [generation.finish_reason for generation in found]
    assert reasons.count("stop") >= 2 and reasons.count("length") >= 3
    text = bytes_of(found[3])
    assert isinstance(json.loads(text), list)
    return found


def bytes_of(generation: Generation) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join(alphabet[token] for token in generation.token_ids if token != END)


def check(found: list[Generation]) -> None:
    for one, wanted in zip(found, expected(), strict=True):
        assert one.token_ids == wanted.token_ids, one.sampling
        assert one.finish_reason == wanted.finish_reason
        for field in ("logprobs", "prompt_logprobs"):
            entries = [getattr(own, field) for own in (one, wanted)]
            assert (entries[0] is None) == (entries[1] is None)
            if entries[0] is not None:
                check_logprobs(*entries)


def check_logprobs(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        if own is None or other is None:
            assert own == other
            continue
        assert own.token_id == other.token_id
        np.testing.assert_allclose(own.logprob, other.logprob, atol=1e-4)
        ours, theirs = ([value for _, value in entry.top] for entry in (own, other))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


MESHES = [  # drafter, then the sizes of the mesh
    ("eagle3", 2, 2),
    ("ngram", 2, 1),
    ("eagle3", 1, 2),
    ("mixed", 1, 4),
    ("eagle3", (2, 2), 1),
    ("eagle3", 1, 1, 2),
    ("mixed", 2, 1, 2),
    ("ngram", 1, 2, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES, ids=str)
def test_every_option_gives_the_text_of_one_device(case: Any):
    check(run(sealed(new_engine(*case))))


def adapting(engine: Engine) -> Any:
    """Changes the costs of rounds from step to step, so that every shape is the best in turn."""
    assert engine.shapes.choices == SHAPES
    rng = np.random.default_rng(0)

    def change() -> None:
        cheap = SHAPES[rng.integers(len(SHAPES))]
        costs = {(1, shape): 1.0 if shape == cheap else 9.0 for shape in SHAPES}
        engine.shapes.costs = LearntCosts(RoundCosts(costs))

    change()
    engine.shapes.restart()
    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "model", "data"), [("eagle3", 1, 1), ("ngram", 2, 1), ("eagle3", 1, 2)]
)
def test_every_option_gives_the_same_text_while_trees_change(drafter: str, model: int, data: int):
    engine = new_engine(drafter, model, data, adaptive=True)
    engine.programs.ask = None  # each shape runs when it is chosen
    check(run(engine, adapting(engine)))
    assert set(engine.shapes.rounds) == set(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [(2, 1), (1, 2)])
def test_an_adaptive_engine_warms_up_on_a_mesh_and_compiles_nothing_more(model: int, data: int):
    engine = new_engine("ngram", model, data, adaptive=True, shapes=(CHAIN.shape,))
    engine.warm_up([SAMPLING[3], SAMPLING[5]], rows=[4])
    compiled = engine.programs.compiled
    check(run(engine))
    assert engine.programs.compiled == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preemption", "model", "sequence"),
    [("swap", 2, 1), ("recompute", 2, 1), ("swap", (2, 2), 1), ("swap", 1, 2), ("recompute", 2, 2)],
)
def test_requests_are_preempted_on_a_mesh(preemption: Any, model: Any, sequence: int):
    engine = new_engine("eagle3", model, sequence=sequence)
    few = CacheConfig(page_size=8, max_length=64, num_pages=14)
    config = EngineConfig(max_rows=4, preemption=preemption)
    engine = Engine(engine.params, few, config, make_matcher=lambda own: compiler().matcher(own))
    check(run(sealed(engine)))
    assert engine.scheduler.preemptions[preemption] > 0
