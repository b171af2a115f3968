"""Weights of a trainer whose mesh is not the engine's, while requests run."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxspec import Engine, EngineParams, SamplingParams, SpeculationConfig, from_nnx, make_mesh
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.decoding.drafters import NGramDrafter
from tests.checkpoints.test_from_nnx import LLAMA, devices, sharded, tensors_of, tunix

PROMPTS = [[5, 9, 2, 7], list(range(3, 20))]
SAMPLING = [
    SamplingParams(temperature=0.8 * i, seed=i, max_tokens=16, ignore_eos=True) for i in range(2)
]


def engine_of(tree: Any, mesh: Mesh | None) -> Engine:
    target = from_nnx(tree, LLAMA, names="tunix.llama3", mesh=mesh)
    params = EngineParams(
        target=target, drafter=NGramDrafter(), speculation=SpeculationConfig.chain(2), mesh=mesh
    )
    return Engine(params, CacheConfig(page_size=8, max_length=64), EngineConfig(max_rows=2))


def texts(engine: Engine) -> list[list[int]]:
    generations = engine.add_all(PROMPTS, SAMPLING)
    engine.finish(generations)
    return [generation.token_ids for generation in generations]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 4)])
def test_a_sharded_trainer_gives_its_weights_to_a_split_engine(first: int, count: int):
    """Of the trainer's devices both, or none, are the engine's."""
    tree = tunix(tensors_of(LLAMA)[1])
    sharpened = {**tree, "lm_head.w": 4 * tree["lm_head.w"]}
    new = {path: np.roll(array, 1, axis=0) for path, array in sharpened.items()}
    expected = texts(engine_of(new, None))
    trainer = Mesh(devices(first, count), ("fsdp",), axis_types=(AxisType.Auto,))
    mesh = make_mesh(2)
    engine = engine_of(sharpened, mesh)
    assert texts(engine) != expected
    given = sharded(new, trainer)
    for _ in range(2):
        generations = engine.add_all(PROMPTS, SAMPLING)
        while not all(generation.token_ids for generation in generations):
            engine.step(1)
        compiled = engine.programs.compiled
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            target = from_nnx(given, LLAMA, names="tunix.llama3", mesh=mesh)
        engine.use_target(target, in_flight="restart")
        engine.finish(generations)
        assert [generation.token_ids for generation in generations] == expected
    assert engine.programs.compiled == compiled, "the second change compiled a program"
