"""Warm-up compiles what its load needs, and no more; what it needs is then there."""

import dataclasses
from typing import Any

import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey
from jaxspec.engine.warm_up.compile_all import batch_keys
from tests.engine.test_mesh_engine import DIGITS, PROMPTS, new_engine
from tests.helpers.marks import slow

STRUCTURED = SamplingParams(max_tokens=20, temperature=0.8, seed=1, structured=DIGITS)
FULL = SamplingParams(max_tokens=20, temperature=0.8, seed=1, presence_penalty=0.5, logprobs=1)


def kinds(engine: Engine, key: Any) -> set[tuple[Kind, bool]]:
    return {(own.kind, own.masked) for own in engine.programs.ready if isinstance(own, key)}


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(
    ("sampling", "rounds"),
    [(STRUCTURED, (Kind.SAMPLED, True)), (FULL, (Kind.FULL, False))],
    ids=["structured", "full"],
)
def test_one_kind_of_requests_has_one_kind_of_programs(
    sampling: SamplingParams, rounds: tuple[Kind, bool], adaptive: bool
):
    # Six rows are admitted at once, and prompts are read in pieces.
    engine = new_engine("ngram", adaptive=adaptive, max_rows=6, prefill_budget=12)
    engine.warm_up([sampling], rows=[6])
    assert kinds(engine, RoundsKey) == {rounds} == kinds(engine, ReadKey)
    compiled = engine.programs.compiled
    requests = [dataclasses.replace(sampling, seed=index) for index in range(len(PROMPTS))]
    generations = engine.add_all(PROMPTS, requests)
    engine.finish(generations)
    assert {generation.error for generation in generations} == {None}
    assert engine.programs.compiled == compiled


@pytest.mark.parametrize(
    ("drafter", "fixed_rounds"), [("none", False), slow("ngram", False), slow("ngram", True)]
)
def test_the_programs_of_a_batch_are_known_before_it_runs(drafter: str, fixed_rounds: bool):
    engine = new_engine(drafter, fixed_rounds=fixed_rounds, max_rows=8, prefix_caching=False)
    for prompts, temperature in ((PROMPTS[:3], 1.0), (PROMPTS[:1], 0.0)):
        sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=1)
        before = set(engine.programs.ready)
        wanted = set(batch_keys(engine.programs, list(map(len, prompts)), sampling))
        engine.finish(engine.add_all(prompts, [sampling] * len(prompts)))
        large = {key for key in engine.programs.ready if isinstance(key, ReadKey | RoundsKey)}
        assert large - before <= wanted
