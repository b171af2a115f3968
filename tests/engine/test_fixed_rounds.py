"""Programs that run a fixed number of rounds, as on GPUs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.state import Emitted, Status
from jaxspec.engine.engine import Engine
from jaxspec.engine.plans.runner import Launched
from jaxspec.engine.programs.call import LaunchedCall, joined
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey, choose_reading
from jaxspec.scheduling.plan import Plan
from jaxspec.scheduling.sequence import Request, Sequence
from tests.helpers.block_heads import block_params
from tests.helpers.engines import new_engine, plain_engine
from tests.helpers.random_models import random_target
from tests.helpers.sampling_reference import reference_texts

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], list(range(20)), [7], [3, 1] * 8, [9] * 5]
SAMPLING = [
    SamplingParams(max_tokens=3 + 7 * index, temperature=0.8 * (index % 2), seed=index)
    for index in range(len(PROMPTS))
]


def texts(engine: Engine) -> list[list[int]]:
    generations = engine.add_all(PROMPTS, SAMPLING)
    engine.finish(generations)
    return [generation.token_ids for generation in generations]


def alone() -> list[list[int]]:
    found = []
    for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):
        engine = plain_engine()
        engine.finish([generation := engine.add(prompt, sampling)])
        found.append(generation.token_ids)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "shape"), [("ngram", None), ("eagle3", None), ("eagle3", PLAIN), ("none", None)]
)
def test_texts_are_the_same(drafter: str, shape: TreeShape | None):
    engine = new_engine(drafter, fixed_rounds=True)
    engine.shape = shape
    assert texts(engine) == alone()
    lengths = {key.rounds for key in engine.programs.ready if isinstance(key, RoundsKey)}
    assert lengths == {1, 4}


def rounds(rows: list[int], count: int, first: int) -> LaunchedCall:
    """A call that emitted ``first``, ``first`` + 1, ... one token of each row a round."""
    tokens = first + np.arange(count * len(rows)).reshape(count, len(rows), 1)
    each, last = np.ones(tokens.shape[:2], np.int32), np.full(len(rows), first)
    fields: dict[str, Any] = dict.fromkeys(
        field.name
        for field in dataclasses.fields(Emitted)  # pyright: ignore[reportArgumentType]
    )
    fields |= {"num_rounds": np.int32(count), "tokens": tokens, "status": last, "ending": last}
    fields |= {"counts": each, "accepted": each, "drafted": each}
    return LaunchedCall.now(np.array(rows), Emitted(**fields))


def test_a_short_text_is_the_same():
    engine = new_engine("none", fixed_rounds=True, max_rows=1, rounds_per_call=2)
    sampling = SamplingParams(max_tokens=6, seed=0)
    engine.finish([generation := engine.add([1, 2, 3], sampling)])
    [expected] = reference_texts(random_target(), [np.array([1, 2, 3])], [sampling], 3 + 6)
    assert [1, 2, 3, *generation.token_ids] == expected
    assert generation.statistics.rounds == 5


def test_a_row_that_ended_in_an_earlier_call_has_pending_tokens():
    """Calls of different sizes are not joined. The drafter's pages stay incomplete."""
    params = block_params("dflash", SpeculationConfig.chain(3))
    runner = Engine(params, CacheConfig(page_size=8, max_length=64))._runner
    first, second = rounds([0, 1], 4, 0), rounds([0], 1, 0)
    second = second._replace(
        emitted=second.emitted.replace(
            counts=np.zeros((1, 1), np.int32), status=np.array([Status.DONE])
        )
    )
    requests = [Request(str(row), (1,), 8, 0.0) for row in range(2)]
    plan = Plan(0, sequences={row: Sequence(requests[row], row, 9, [1]) for row in range(2)})
    launched = Launched(plan, [first], params.speculation.shape)
    [alone, other] = runner.results(launched)
    assert alone.pending == other.pending == 1
    [both, other] = runner.results(launched._replace(calls=[first, second]))
    assert (both.tokens, both.pending) == (alone.tokens, 1)
    assert both.ended is not None and other.ended is None


def test_calls_of_the_same_rows_are_joined():
    calls = [rounds([0, 1], 0, 1), rounds([0, 1], 2, 10), rounds([0, 1], 1, 20), rounds([1], 1, 30)]
    first, both, last = joined(calls)
    assert first is calls[0] and last is calls[3]
    assert both.emitted.num_rounds == 3
    assert both.emitted.tokens[:, :, 0].tolist() == [[10, 11], [12, 13], [20, 21]]
    assert both.emitted.status.tolist() == [20, 20] and both.emitted.logprobs is None


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (2, 1), (3, 4), (4, 4), (6, 8), (8, 8), (32, 8)]
)
def test_a_sealed_engine_reads_a_few_rows_in_small_programs(count: int, expected: int):
    ready = [ReadKey(rows, 8, 512, Kind.GREEDY) for rows in (1, 4, 8)]
    wanted = ReadKey(count, 8, 512, Kind.GREEDY)
    chosen = choose_reading(ready, wanted, wanted, sealed=True)
    assert chosen.rows == expected
