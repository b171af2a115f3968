"""An engine to which nobody gave a tree: it chooses, and compiles beside its work."""

import concurrent.futures

import jax
import jax.numpy as jnp
import pytest

from jaxspec.commands.serve.server import EVERYTHING
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.limits import adapts, crowded_rows, learns_costs
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey
from jaxspec.engine.warm_up.compile_all import coverage, reading_keys, rounds_keys
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.scheduling.round_costs import LearntCosts, RoundCosts
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import make_params

CHAIN = TreeShape.parse("chain:2")
MOVES = 24  # programs that move rows and pages, at most


def default_params(drafter: str = "ngram", acceptance: str = "match") -> EngineParams:
    """As load makes them where no tree is asked for."""
    speculation = SpeculationConfig.chain(2, acceptance)
    return make_params(drafter, speculation).replace(default_tree=True)


def rounded_params(target: Decoder | None = None) -> EngineParams:
    params = default_params()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target or params.target)
    return params.replace(target=rounded)


def new_engine() -> Engine:
    return Engine(
        default_params(),
        CacheConfig(page_size=8, max_length=72),
        EngineConfig(max_rows=2, rounds_per_call=2),
    )


class Given(LearntCosts):
    """Costs that calls do not correct; rounds of ``cheap`` are the fastest."""

    def __init__(self, cheap: TreeShape):
        shapes = (PLAIN, TreeShape.parse("chain:1"), CHAIN)
        super().__init__(RoundCosts({(1, shape): 1.0 + 99 * (shape != cheap) for shape in shapes}))

    def observe(self, rows: int, shape: TreeShape, rounds: int, seconds: float) -> None:
        pass


def test_engines_adapt_where_nobody_asked_for_a_tree():
    own = EngineConfig()
    assert adapts(default_params(), own)
    assert not adapts(default_params().replace(default_tree=False), own)
    assert not adapts(default_params("none"), own)
    assert not adapts(default_params(acceptance="rejection"), own)
    assert not adapts(default_params(), EngineConfig(adaptive=False))
    assert adapts(default_params().replace(default_tree=False), EngineConfig(adaptive=True))


def test_a_cpu_is_never_crowded_as_it_is_the_host():
    """Its calls stay short while others wait, however small the model is."""
    assert crowded_rows(default_params()) is None


def rounded_engine(target: Decoder | None = None) -> Engine:
    params = rounded_params(target)
    return Engine(params, CacheConfig(page_size=8, max_length=24), EngineConfig(max_rows=1))


def test_costs_are_estimates_where_trees_change_texts_by_rounding():
    engine = rounded_engine()
    assert engine.shapes.choices == (PLAIN, TreeShape.parse("chain:1"), CHAIN)
    assert engine.programs.ask is None  # whether a program is ready must not decide either
    assert not learns_costs(rounded_params(), EngineConfig())
    assert not engine.shapes.learns and not engine.shapes.adapts_by_time
    assert learns_costs(default_params(), EngineConfig())
    assert learns_costs(rounded_params(), EngineConfig(adaptive=True))


@pytest.mark.slow  # by default: the test above
def test_rounds_leave_estimates_as_they_are():
    engine = rounded_engine()
    before = engine.shapes.seconds(1, PLAIN)
    sampling = SamplingParams(max_tokens=12, stop_token_ids=())
    engine.finish([engine.add([5, 9, 2, 7, 5, 9], sampling)])
    assert engine.shapes.rounds.total() > 0
    assert engine.shapes.seconds(1, PLAIN) == before


@pytest.mark.slow  # by default tests/scheduling/test_round_costs.py, without an engine
def test_trees_cost_fewer_experts_once_lookup_has_found_fewer_tokens():
    engine = rounded_engine(random_expert_target())
    assert engine.shapes.choices is not None and not engine.shapes.learns
    before = {shape: engine.shapes.seconds(1, shape) for shape in engine.shapes.choices}
    sampling = SamplingParams(temperature=1.0, max_tokens=12, stop_token_ids=())
    engine.finish([engine.add([5, 9, 2, 7, 5, 9], sampling)])
    after = {shape: engine.shapes.seconds(1, shape) for shape in before}
    drafted = {shape for shape in engine.shapes.rounds if shape != PLAIN}
    assert drafted
    assert {shape for shape in before if after[shape] < before[shape]} == drafted
    assert all(after[shape] == before[shape] for shape in before if shape not in drafted)


@pytest.mark.parametrize("rows", [32, 256])
def test_a_whole_warm_up_of_a_gpus_default_engine_fits_its_programs(rows: int):
    """In bfloat16, with programs of fixed rounds; nothing is compiled here."""
    config = EngineConfig(max_rows=rows, fixed_rounds=True)
    engine = Engine(rounded_params(), CacheConfig(page_size=16, max_length=1024), config)
    programs, shapes = engine.programs, engine.shapes.compiled_ahead(None)
    assert len(shapes) == 3
    cover = coverage(programs, engine.limits, shapes, EVERYTHING, None, None)
    keys = {*reading_keys(programs, cover), *rounds_keys(programs, cover)}
    assert len(keys) + MOVES <= config.max_programs


def test_a_better_tree_is_compiled_beside_the_work_and_the_text_stays():
    engine, prompt = new_engine(), [5, 9, 2, 7, 5, 9]
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=60, stop_token_ids=())
    engine.shapes.costs = Given(PLAIN)
    first = engine.add(prompt, sampling)
    while not engine.shapes.rounds[PLAIN]:
        engine.step()
    engine.shapes.costs = Given(CHAIN)
    while not engine.programs.coming:  # enough calls must ask for it
        assert not first.done
        engine.step()
    [(key, job)] = engine.programs.coming.items()
    assert isinstance(key, RoundsKey) and key.shape == CHAIN
    concurrent.futures.wait([job])
    assert set(engine.shapes.rounds) == {PLAIN}
    compiled = engine.programs.compiled
    engine.finish([first])
    assert engine.shapes.rounds[CHAIN] > 0
    assert engine.programs.compiled <= compiled + 2  # the chain's, and that of a row's end
    engine.shapes.costs = Given(PLAIN)
    again = engine.add(prompt, sampling)
    engine.finish([again])
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_ready_program_runs_while_the_one_that_fits_is_compiled(wanted: int):
    programs, asked = new_engine().programs, []
    programs.ask = lambda key: bool(asked.append(key))
    large, small = ReadKey(2, 9, 64, Kind.SAMPLED), ReadKey(wanted, 9, 16, Kind.GREEDY)
    assert programs.now(small) == small and not asked  # nothing else could run
    programs.ready.add(large)
    sampling = small._replace(kind=Kind.SAMPLED)  # what runs meanwhile samples: others did
    assert programs.now(small) == large and asked == [sampling]
    programs.ready.add(sampling)
    assert programs.now(small) == sampling and asked == [sampling]


def test_a_program_of_a_higher_kind_is_no_reason_to_compile():
    programs, asked = new_engine().programs, []
    programs.ask = lambda key: bool(asked.append(key))
    sampled = RoundsKey(1, 9, PLAIN, Kind.SAMPLED)
    programs.ready.add(sampled)
    assert programs.now(sampled._replace(kind=Kind.GREEDY)) == sampled and not asked
