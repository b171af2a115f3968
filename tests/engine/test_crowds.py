"""Crowds on a CPU: programs without a drafter serve them, and the texts stay."""

import dataclasses

import numpy as np
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.limits import HIGH_ACCEPTANCE, undrafted_rows
from jaxspec.engine.programs.sizes import (
    Kind,
    Load,
    ReadKey,
    RoundsKey,
    choose_reading,
    choose_rounds,
)
from jaxspec.engine.warm_up.compile_all import Coverage, coverage, reading_keys, rounds_keys
from jaxspec.functional import EngineParams
from jaxspec.scheduling.round_costs import RoundCosts
from tests.helpers.random_models import make_params
from tests.helpers.sampling_reference import reference_texts

CHAIN = SpeculationConfig.chain(2)
CACHE = CacheConfig(page_size=8, max_length=72)
ENGINE = EngineConfig(max_rows=2, rounds_per_call=4)


def default_params(drafter: str) -> EngineParams:
    """As load makes them where no tree is asked for."""
    return make_params(drafter, CHAIN).replace(default_tree=drafter != "none")


def new_engine(drafter: str, crowd: int | None) -> Engine:
    engine = Engine(default_params(drafter), CACHE, ENGINE)
    engine.shapes.crowds.limits = dataclasses.replace(engine.limits, undrafted_rows=crowd)
    return engine


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Of many lengths, greedy and sampled."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(60, size=5 + index).tolist(),
            SamplingParams(
                temperature=0.7 * (index % 2),
                seed=index,
                max_tokens=10 + 4 * (index % 4),
                stop_token_ids=(),
            ),
        )
        for index in range(count)
    ]


def served(engine: Engine, count: int) -> list[Generation]:
    generations = [engine.add(*request) for request in requests(count)]
    engine.finish(generations)
    return generations


def undrafted_keys(engine: Engine) -> list[ReadKey | RoundsKey]:
    keys = [key for key in engine.programs.ready if isinstance(key, ReadKey | RoundsKey)]
    return [key for key in keys if key.undrafted]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine("eagle3", crowd=2)


def test_a_crowds_texts_are_those_of_plain_decoding_and_no_program_with_a_drafter_is_compiled(
    engine: Engine,
):
    prompts, sampling = zip(*requests(8), strict=True)
    arrays = [np.array(prompt) for prompt in prompts]
    plain = reference_texts(default_params("none").target, arrays, sampling, CACHE.max_length)
    texts = [
        [*prompt, *each.token_ids]
        for (prompt, _), each in zip(requests(8), served(engine, 8), strict=True)
    ]
    assert texts == plain
    large = [key for key in engine.programs.ready if isinstance(key, ReadKey | RoundsKey)]
    assert large == undrafted_keys(engine)
    assert list(engine.shapes.rounds) == [PLAIN]
    assert engine.shapes.policy is not None
    assert not any(engine.shapes.policy.estimate.rounds_seen(each) for each in (PLAIN, CHAIN.shape))


def test_a_tree_that_is_asked_for_is_drafted_at_once(engine: Engine):
    alone = [each.token_ids for each in served(engine, 4)]
    generations = [engine.add(*request) for request in requests(4)]
    while not generations[0].token_ids:
        engine.step()
    engine.shape = CHAIN.shape
    engine.step()
    assert not any(each.is_unread for each in engine.scheduler.running)
    engine.finish(generations)
    engine.shape = None
    assert [each.token_ids for each in generations] == alone
    assert engine.shapes.rounds[CHAIN.shape] > 0
    assert any(each.preemptions for each in generations)


def test_requests_that_come_and_go_around_a_crowd_keep_their_texts(engine: Engine):
    """Some run before it, which then begins; some come when it is nearly gone."""
    alone = [each.token_ids for each in served(engine, 8)]
    engine.forget_texts()
    engine.programs.sealed = True  # nothing more need be compiled
    todo = requests(8)
    first = [engine.add(*todo[0])]
    while not first[0].token_ids:
        engine.step()
    assert not any(each.is_unread for each in engine.scheduler.running)
    crowd = [engine.add(*request) for request in todo[1:6]]
    engine.step()
    assert all(each.is_unread for each in engine.scheduler.running)
    while not all(each.done for each in crowd[:4]):
        engine.step()
    last = [engine.add(*request) for request in todo[6:]]
    engine.finish([*first, *crowd, *last])
    assert [each.token_ids for each in (*first, *crowd, *last)] == alone


def test_a_program_with_a_drafter_serves_an_unread_row_until_there_is_another():
    drafted = RoundsKey(4, 9, PLAIN, Kind.SAMPLED)
    wanted = drafted._replace(undrafted=True)
    assert drafted.holds(wanted) and not wanted.holds(drafted)
    assert choose_rounds({drafted}, wanted, wanted, sealed=True) == drafted
    assert choose_rounds({drafted, wanted}, wanted, wanted, sealed=True) == wanted
    assert choose_rounds({drafted}, wanted, wanted, sealed=False) == wanted  # it is compiled
    assert choose_rounds({wanted}, drafted, drafted, sealed=True) == drafted
    prompts = ReadKey(4, 9, 16, Kind.SAMPLED)
    fast = prompts._replace(undrafted=True)
    assert choose_reading({prompts}, fast, fast, sealed=True) == prompts
    assert choose_reading({prompts, fast}, fast, fast, sealed=True) == fast
    assert choose_reading({prompts}, fast, fast, sealed=False) == fast
    engine, asked = new_engine("ngram", crowd=3), []
    engine.programs.ask = lambda key: bool(asked.append(key))
    engine.programs.ready.add(drafted)
    assert engine.programs.now(wanted) == drafted and asked == [wanted]


def test_warm_up_compiles_for_a_crowd_what_a_crowd_uses():
    engine = Engine(default_params("ngram"), CACHE, EngineConfig(max_rows=4))
    limits = dataclasses.replace(engine.limits, undrafted_rows=3)
    shapes = engine.shapes.compiled_ahead(None)
    cover = coverage(engine.programs, limits, shapes, [SamplingParams()], 64, None)
    rounds, reads = rounds_keys(engine.programs, cover), reading_keys(engine.programs, cover)
    assert {(key.rows, key.undrafted) for key in rounds} == {
        (1, False),
        (2, False),
        (1, True),
        (4, True),
    }
    assert all(key.shape == PLAIN for key in rounds if key.undrafted)
    assert {key.rows for key in reads if not key.undrafted} == {1, 2}
    assert {key.rows for key in reads if key.undrafted} == {1, 4}
    few = Coverage.drafted_sizes
    only = dataclasses.replace(cover, sizes=(1, 4))
    assert few(only, 3) == (1, 4) and few(only, None) == (1, 4)  # a program of 4 must serve 2 rows


def test_only_default_engines_whose_drafting_is_slow_in_a_crowd_leave_the_drafter_out():
    params = default_params("eagle3")
    sizes = new_engine("ngram", None).programs.sizes
    many = dataclasses.replace(sizes, num_rows=2**14)
    found = undrafted_rows(params, many, EngineConfig())
    assert found is not None and 0 < HIGH_ACCEPTANCE < 1
    assert undrafted_rows(params, sizes, EngineConfig()) is None  # two rows are no crowd
    for config in (
        EngineConfig(adaptive=False),
        EngineConfig(adaptive=True),
        EngineConfig(deterministic=True),
    ):
        assert undrafted_rows(params, many, config) is None
    assert undrafted_rows(params.replace(default_tree=False), many, EngineConfig()) is None
    assert undrafted_rows(default_params("none"), many, EngineConfig()) is None


def test_after_a_crowd_rows_are_read_again_where_others_come_or_it_pays(engine: Engine):
    """Only if the programs that draft are there: else they are asked for."""
    crowds, policy, scheduler = engine.shapes.crowds, engine.shapes.policy, engine.scheduler
    assert policy is not None
    before, crowds.limits = crowds.limits, dataclasses.replace(crowds.limits, undrafted_rows=4)
    shapes = (PLAIN, TreeShape.parse("chain:1"), CHAIN.shape)
    generation = engine.add([5, 9, 2], SamplingParams(max_tokens=60, stop_token_ids=()))
    engine.shape = CHAIN.shape
    while len(generation.token_ids) < 12:
        engine.step()
    engine.shape = None
    [row] = scheduler.running

    def undrafted(*, reading: float) -> bool:
        """Where reading 64 tokens takes so many seconds, and chains are quick."""
        rounds = {(1, shape): 1.0 if shape == CHAIN.shape else 100.0 for shape in shapes}
        costs = RoundCosts(rounds | {(64, PLAIN): reading})
        return crowds.leave_drafter_out(scheduler, Load(2, 72, Kind.SAMPLED), policy, costs)

    assert not undrafted(reading=1e4)  # all was read
    row.leave_drafter_out()
    assert undrafted(reading=1e4) and not undrafted(reading=100)
    ready, engine.programs.ready = engine.programs.ready, set()
    assert undrafted(reading=100)
    engine.programs.ready = ready
    other = engine.add([5, 9, 2], SamplingParams(max_tokens=60, stop_token_ids=()))
    assert not undrafted(reading=1e4)
    crowds.limits = dataclasses.replace(crowds.limits, undrafted_rows=3)
    assert undrafted(reading=100)  # it is nearly a crowd
    for each in (generation, other):
        engine.cancel(each)
    crowds.limits = before


def test_new_requests_are_not_kept_waiting_by_the_compiler_where_a_crowd_has_left_programs():
    """What serves them meanwhile is compiled first, and what drafts when it is worth it."""
    engine, asked = new_engine("eagle3", crowd=2), []
    served(engine, 4)
    engine.programs.ask = lambda key: bool(asked.append(key))
    [alone] = served(engine, 1)
    meanwhile = set(asked)
    assert alone.done and list(engine.shapes.rounds) == [PLAIN]
    assert {type(key) for key in meanwhile} == {ReadKey, RoundsKey}
    assert all((key.rows, key.kind, key.undrafted) == (1, Kind.SAMPLED, True) for key in meanwhile)
    engine.programs.ready |= meanwhile
    asked.clear()
    engine.shapes.crowds.observe(1e9)  # seconds without the drafter
    served(engine, 1)
    assert {(type(key), key.kind, key.undrafted) for key in asked} == {
        (ReadKey, Kind.SAMPLED, False),
        (RoundsKey, Kind.SAMPLED, False),
    }
