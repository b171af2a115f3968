"""An engine that chooses its draft trees: the text stays, and nothing compiles after warm-up."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.engine import Engine
from jaxspec.scheduling.requests import SamplingParams
from tests.engines import LENGTH, plain_engine
from tests.random_models import make_params, random_prompts

CHAIN = TreeShape.parse("chain:2")
SAMPLED = SamplingParams(temperature=1.0)


def new_adaptive(drafter: str = "ngram", **options: Any) -> Engine:
    """Of two rows, with chains of up to two tokens."""
    options = {"max_rows": 2, "rounds_per_call": 4, "adaptive": True} | options
    params = make_params(drafter, SpeculationConfig.chain(2))
    return Engine(params, CacheConfig(page_size=8, max_length=LENGTH), EngineConfig(**options))


@functools.cache
def warm_engine() -> Engine:
    """Plain decoding or a chain of two; programs that sample serve greedy requests, too."""
    engine = new_adaptive(shapes=(CHAIN,))
    engine.warm_up([SAMPLED])
    return engine


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of what XLA compiles meanwhile."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


@functools.cache
def alone(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """A request's text without speculation, on an engine of one row."""
    generation = plain_engine().add(prompt, sampling)
    plain_engine().finish([generation])
    return generation.token_ids


def requests(count: int, temperatures: tuple[float, ...], seed: int) -> list[Any]:
    """Prompts with their sampling, of many lengths; some of them begin alike."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, count).tolist()
    prompts = [prompt.tolist() for prompt in random_prompts(tuple(lengths), seed=seed)]
    shared = random_prompts((17,), seed=99)[0].tolist()
    return [
        (
            [*shared, *prompt] if index % 3 == 2 else prompt,
            SamplingParams(
                temperature=temperatures[index % len(temperatures)],
                seed=index,
                max_tokens=int(rng.integers(2, 16)),
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def serve(engine: Engine, load: list[Any], seed: int) -> list[list[int]]:
    """Let requests arrive at random moments, and change the costs of rounds meanwhile, so that each
    shape is the best now and then."""
    rng, left, added = np.random.default_rng(seed), list(load), []
    shapes = engine.shapes.choices or ()
    while left or not all(one.done for one in added):
        if left and rng.random() < 0.5:
            added.append(engine.add(*left.pop(0)))
            costs = {(rows, shape): rng.uniform(1, 3) for rows in (1, 2) for shape in shapes}
            engine.shapes.set_costs(costs)
        engine.step()
    return [one.token_ids for one in added]


def check_load(engine: Engine, compilations: list[str], seed: int) -> None:
    """Texts of a random load are those of plain decoding, and nothing compiles."""
    compiled = engine.programs.compiled
    compilations.clear()
    engine.shapes.rounds.clear()
    load = requests(20, (0.0, 0.8), seed)
    texts = serve(engine, load, seed)
    assert compilations == [] and engine.programs.compiled == compiled
    assert set(engine.shapes.rounds) == set(engine.shapes.choices or ())
    assert min(engine.shapes.rounds.values()) > 10
    for (prompt, sampling), text in zip(load, texts, strict=True):
        assert text == alone(tuple(prompt), sampling)
    engine._drain()
    usage = engine.scheduler.usage()
    assert usage.free + usage.idle == usage.total


def test_texts_stay_and_nothing_compiles_while_shapes_change(compilations: list[str]):
    check_load(warm_engine(), compilations, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "draft_model"])
def test_the_same_with_every_kind_of_program(drafter: str, compilations: list[str]):
    engine = new_adaptive(drafter, max_rows=3)
    engine.warm_up()
    assert engine.shapes.choices == (PLAIN, TreeShape.parse("chain:1"), CHAIN)
    for seed in range(3):
        check_load(engine, compilations, seed)
