"""An engine that chooses its draft trees: the text stays, and nothing compiles after warm-up."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.scheduling.round_costs import LearntCosts, RoundCosts
from tests.helpers.block_heads import KINDS, block_params
from tests.helpers.compilations import Compilations
from tests.helpers.engines import LENGTH
from tests.helpers.random_models import make_params

CHAIN, TREE = TreeShape.parse("chain:2"), TreeShape.parse("6:2:3")
SAMPLED = SamplingParams(temperature=1.0)


def new_adaptive(drafter: str = "ngram", largest: TreeShape = CHAIN, **options: Any) -> Engine:
    """Of two rows, with chains of up to two tokens by default."""
    options = {"max_rows": 2, "rounds_per_call": 4, "adaptive": True} | options
    make = block_params if drafter.endswith(KINDS) else make_params
    params = make(drafter, SpeculationConfig(**dataclasses.asdict(largest)))
    return Engine(params, CacheConfig(page_size=8, max_length=LENGTH), EngineConfig(**options))


@functools.cache
def warm_engine() -> Engine:
    """Plain decoding or a chain of two, for requests of 16 tokens. Few programs: those that sample
    serve greedy requests, too, and those of two rows single ones."""
    engine = new_adaptive(shapes=(CHAIN,))
    engine.warm_up([SAMPLED], tokens=16, rows=[2])
    return engine


def alone(engine: Engine, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """A request's text without speculation and without others; it reads all of its prompt."""
    engine.shape = PLAIN
    generation = engine.add(prompt, dataclasses.replace(sampling, cache_salt="alone"))
    engine.finish([generation])
    engine.shape = None
    return generation.token_ids


class Given(LearntCosts):
    """Costs that calls do not correct."""

    def observe(self, rows: int, shape: TreeShape, rounds: int, seconds: float) -> None:
        pass


def requests(count: int, seed: int, most: int = LENGTH) -> list[Any]:
    """Prompts with their sampling, of at most so many tokens together; some begin alike."""
    rng, shared = np.random.default_rng(seed), list(range(most // 2))
    load = []
    for index in range(count):
        prompt = rng.integers(96, size=rng.integers(1, most // 4)).tolist()
        prompt = [*shared, *prompt] if index % 3 == 2 else prompt
        new = int(rng.integers(1, most - len(prompt) + 1))
        sampling = SamplingParams(temperature=(0.0, 0.8)[index % 2], seed=index, max_tokens=new)
        load.append((prompt, sampling))
    return load


def serve(engine: Engine, load: list[Any], seed: int) -> list[list[int]]:
    """Let requests arrive at random moments, and change the costs of rounds meanwhile, so that each
    shape is the best now and then."""
    rng, left, added = np.random.default_rng(seed), list(load), []
    shapes = engine.shapes.choices or ()
    while left or not all(one.done for one in added):
        if left and rng.random() < 0.5:
            added.append(engine.add(*left.pop(0)))
            cheap = shapes[rng.integers(len(shapes))]
            costs = {(1, shape): 1.0 if shape == cheap else 9.0 for shape in shapes}
            engine.shapes.costs = Given(RoundCosts(costs))
        engine.step()
    return [one.token_ids for one in added]


def check_load(engine: Engine, compilations: Compilations, load: list[Any], seed: int = 0) -> None:
    """Texts of a random load are those of plain decoding, and nothing compiles."""
    compiled = engine.programs.compiled
    compilations.clear()
    engine.shapes.rounds.clear()
    texts = serve(engine, load, seed)
    assert compilations == [] and engine.programs.compiled == compiled
    assert set(engine.shapes.rounds) == set(engine.shapes.choices or ())
    assert min(engine.shapes.rounds.values()) > 10
    for (prompt, sampling), text in zip(load, texts, strict=True):
        assert text == alone(engine, prompt, sampling)
    assert compilations == []
    engine._drain()
    usage = engine.scheduler.usage()
    assert usage.free + usage.idle == usage.total


@pytest.mark.slow
def test_texts_stay_and_nothing_compiles_while_shapes_change(compilations: Compilations):
    engine = warm_engine()
    check_load(engine, compilations, requests(40, seed=3, most=16))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "draft_model"])
def test_the_same_with_every_kind_of_program(drafter: str, compilations: Compilations):
    engine = new_adaptive(drafter, max_rows=3)
    engine.warm_up()
    assert engine.shapes.choices == (PLAIN, TreeShape.parse("chain:1"), CHAIN)
    for seed in range(3):
        check_load(engine, compilations, requests(24, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "largest"),
    [("suffix", CHAIN), ("dflash", TREE), ("dspark", TREE), ("ngram+dflash", CHAIN)],
    ids=lambda own: getattr(own, "name", own),
)
def test_the_same_with_other_drafters_and_trees(
    drafter: str, largest: TreeShape, compilations: Compilations
):
    engine = new_adaptive(drafter, largest)
    engine.warm_up([SAMPLED], tokens=32, rows=[2])
    assert engine.shapes.choices == (PLAIN, TreeShape.parse("chain:1"), largest)
    check_load(engine, compilations, requests(32, seed=3, most=32))


@pytest.mark.slow
def test_structured_and_full_requests_compile_nothing_either(compilations: Compilations):
    # Under test_llm_structured the texts of structured requests are checked; here the programs.
    engine = new_adaptive(shapes=(CHAIN,), max_programs=200)
    full = SamplingParams(temperature=0.8, seed=1, max_tokens=9, logprobs=2, presence_penalty=0.5)
    engine.warm_up([SAMPLED, full])
    before = compilations.copy()
    engine.shapes.rounds.clear()
    load = [(prompt, full if index % 2 else SAMPLED) for index, (prompt, _) in
            enumerate(requests(8, seed=1))]  # fmt: skip
    serve(engine, load, seed=1)
    assert compilations == before and set(engine.shapes.rounds) == {PLAIN, CHAIN}


@pytest.mark.slow
def test_other_weights_are_learnt_anew_at_the_same_costs():
    engine = warm_engine()
    engine.finish([engine.add([5, 6, 7], SamplingParams(max_tokens=12))])
    policy, costs = engine.shapes.policy, engine.shapes.costs
    engine.use_target(engine.params.target)
    assert engine.shapes.policy is not policy and engine.shapes.policy is not None
    assert engine.shapes.costs is costs


@pytest.mark.slow
def test_a_shape_may_be_fixed_for_a_while():
    engine = warm_engine()
    engine.shape = CHAIN
    engine.shapes.rounds.clear()
    engine.finish([engine.add([5, 6, 7], SamplingParams(max_tokens=12))])
    engine.shape = None
    assert set(engine.shapes.rounds) == {CHAIN}


@pytest.mark.slow
def test_a_second_warm_up_only_measures(compilations: Compilations):
    engine, prompt, sampling = warm_engine(), [5, 6, 7], SamplingParams(max_tokens=12)
    text = alone(engine, prompt, sampling)
    engine.shapes.costs = Given(RoundCosts({(1, shape): 1e6 for shape in (PLAIN, CHAIN)}))
    compilations.clear()
    engine.warm_up([SAMPLED], tokens=16, rows=[2])
    assert compilations == []
    assert 0 < engine.shapes.seconds(2, PLAIN) < 100 and 0 < engine.shapes.seconds(2, CHAIN) < 100
    # Rows that were measured are empty, and what they left in the pages is not found.
    assert engine.scheduler.cache_statistics() == (0, 0)
    assert alone(engine, prompt, sampling) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens must be an integer, at least 1, got 0"),
        ({"rows": [0]}, "rows must be an integer, at least 1, got 0"),
        ({"sampling": []}, "sampling must name at least one way"),
        (
            {"sampling": [SAMPLED, SamplingParams(logprobs=1)], "rows": range(1, 3)},
            r"warm_up needs \d+ programs, and max_programs is 9: raise it, or name fewer",
        ),
    ],
)
def test_bad_arguments_of_warm_up_are_one_line(arguments: dict[str, Any], message: str):
    engine = warm_engine()
    engine.programs.max_programs = 9
    try:
        with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
            engine.warm_up(**arguments)
    finally:
        engine.programs.max_programs = engine.config.max_programs


@pytest.mark.slow
def test_warm_up_waits_for_nobody():
    engine = warm_engine()
    generation = engine.add([1, 2], SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="requests are under way"):
        engine.warm_up()
    engine.cancel(generation)
    engine._drain()


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("none", {}, "adaptive needs a drafter"),
        ("ngram", {"shapes": (TreeShape(10, 9, 1),)}, "shapes: chain:9 does not fit the engine"),
        ("ngram", {"shapes": (TreeShape(3, 1, 9),)}, "shapes: 3:1:9 does not fit the engine"),
    ],
)
def test_shapes_that_cannot_work_are_refused(drafter: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        new_adaptive(drafter, **options)
