"""A pipeline of stages: the text of one device, however the layers are split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.functional import pipelined
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.pipeline.programs import PipelinePrograms
from jaxspec.engine.programs.pipeline.use import PipelineUse
from jaxspec.engine.programs.sizes import RoundsKey
from jaxspec.evaluation.benchmarks.collective_volume import parse_collectives, totals
from jaxspec.functional import EngineParams, init_state
from jaxspec.models.pipeline_cut import check_layers, split_layers
from jaxspec.parallel import TensorParallel, make_mesh, stage_meshes
from pallas_kernels.selection import NO_KERNELS
from tests.engine.test_mesh_engine import CACHE, CHAIN, TARGET, check, compiler, run, sealed
from tests.helpers.engines import seal
from tests.helpers.layouts import in_stages
from tests.helpers.marks import slow_by_name
from tests.helpers.programs import FAST_COMPILE, traces
from tests.helpers.random_models import make_params, random_prompts, random_target, tiny_config
from tests.helpers.sampling_reference import reference_texts
from tests.helpers.split_models import params_of

# The vocabulary cannot be split evenly, and on four devices the two KV heads are repeated.
DEEP = random_target(tiny_config(num_layers=4, vocab_size=97, num_heads=8))
THREE_LAYERS = random_target(tiny_config(num_layers=3, vocab_size=97, num_heads=8))
PROMPTS = [p.tolist() for p in random_prompts((5, 9, 170, 3, 11), seed=6, vocab=97)]
SHORT = [prompt[:50] for prompt in PROMPTS]  # of smaller programs
SAMPLING = [
    SamplingParams(max_tokens=12, temperature=0.9 * (index % 2), top_p=0.9, seed=index)
    for index in range(len(PROMPTS))
]


@functools.cache
def one_device(name: str) -> EngineParams:
    return params_of(name, DEEP)


def staged(
    params: EngineParams, layers: tuple[int, ...], model: int = 1, *, shard_drafter: bool = False
) -> EngineParams:
    mesh = make_mesh(model, pipeline_parallel=len(layers))
    return in_stages(params, layers, stage_meshes(mesh), shard_drafter=shard_drafter)


def engine_of(
    params: EngineParams, page_size: int = 8, prompts: list[list[int]] = PROMPTS
) -> Engine:
    longest = max(map(len, prompts))
    cache = CacheConfig(page_size=page_size, max_length=80 if prompts is SHORT else 256)
    engine = Engine(params, cache, EngineConfig(max_rows=4, rounds_per_call=4))
    return seal(engine, SAMPLING[1], prompt_tokens=longest)


def texts(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], int]]:
    generations = engine.add_all(prompts, SAMPLING)
    engine.finish(generations)
    assert not any(one.error for one in generations)
    return [(one.token_ids, one.statistics.rounds) for one in generations]


@functools.cache
def expected(name: str) -> list[tuple[list[int], int]]:
    return texts(engine_of(one_device(name)))


@functools.cache
def small() -> EngineParams:
    """Of smaller programs."""
    return params_of("ngram", THREE_LAYERS)


@pytest.fixture(scope="module")
def two_stages() -> Engine:
    return engine_of(staged(small(), (2, 1)), 1, SHORT)


def test_two_stages_give_the_text_of_one_device(two_stages: Engine):
    arrays = [np.array(prompt) for prompt in SHORT]
    found, plain = texts(two_stages, SHORT), reference_texts(THREE_LAYERS, arrays, SAMPLING, 80)
    assert [[*prompt, *text] for prompt, (text, _) in zip(SHORT, found, strict=True)] == plain


@pytest.mark.parametrize(
    ("name", "layers", "model", "page_size"),
    slow_by_name(
        {
            "eagle3 tree": [((2, 1, 1), 1, 16), ((2, 2), 4, 1), ((2, 2, 0), 1, 64)],
            "none": [((2, 2), 1, 8), ((3, 1), 4, 16)],
            "draft_model": [((3, 1), 1, 8), ((4, 0), 2, 16)],
            "eagle1": [((1, 3), 1, 64)],
            "eagle3": [((4, 0), 1, 8), ((1, 1, 1, 1), 2, 8), ((2, 2), 4, 8)],
            "eagle3 rejection": [((2, 2), 2, 8)],
            "mixed": [((2, 2), 1, 8)],
            "dflash tree": [((2, 2), 1, 8), ((4, 0), 2, 4)],
            "dspark": [((1, 2, 1), 1, 16)],
        }
    ),
)
def test_stages_give_the_text_of_one_device(
    name: str, layers: tuple[int, ...], model: int, page_size: int
):
    params = staged(one_device(name), layers, model)
    assert texts(engine_of(params, page_size)) == expected(name)


@pytest.mark.parametrize("model", [1, 2])
def test_a_stage_sums_its_products_and_sends_nothing_else(model: int):
    params = staged(one_device("eagle3"), (3, 1), model)
    [stage], batch, nodes = params.stages, 4, 3
    last, capture = params.last_stage, params.drafter.capture

    def arguments() -> Any:
        state = init_state(last, batch, 16, page_size=8)
        _, (_, passage) = pipelined.open_round(last, state, last.round_options(), jnp.arange(batch))
        return pipelined.init_stage(stage, num_pages=9, page_size=8, num_rows=batch), passage

    states, passage = jax.eval_shape(arguments)
    run = functools.partial(pipelined.pass_stage, capture=capture, kernels=NO_KERNELS)
    compiled = jax.jit(run).lower(stage, states, passage).compile(FAST_COMPILE)
    found = totals(parse_collectives(compiled.as_text() or ""))
    sums, float32 = 2 * len(stage.layers), 4
    sent = 2 * (model - 1) / model * batch * nodes * DEEP.config.hidden_size * float32
    assert found == ({} if model == 1 else {"all-reduce": (sums, sums * sent)})


def new_engine(layers: tuple[int, ...], cache: CacheConfig = CACHE, **options: Any) -> Engine:
    params = staged(make_params("eagle3", CHAIN, TARGET), layers)
    config = EngineConfig(max_rows=4, rounds_per_call=4, **options)
    return Engine(params, cache, config, make_matcher=lambda own: compiler().matcher(own))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(1, 1), (2, 0)])
def test_every_option_gives_the_text_of_one_device(layers: tuple[int, ...]):
    check(run(sealed(new_engine(layers))))


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_requests_of_a_pipeline_are_preempted(preemption: Any):
    few = CacheConfig(page_size=8, max_length=64, num_pages=14)
    engine = new_engine((1, 1), cache=few, preemption=preemption)
    check(run(sealed(engine)))
    assert engine.scheduler.preemptions[preemption] > 0


def all_compiled(engine: Engine) -> tuple[int, int, int]:
    """Programs, and those that join what groups emitted."""
    programs = engine.programs
    assert isinstance(programs, PipelinePrograms)
    return programs.compiled, traces(programs._join), traces(programs._join_reads)


def fail(_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.slow
def test_a_pipeline_warms_up_adapts_and_starts_anew_after_an_error():
    engine = new_engine((1, 1), adaptive=True)
    engine.warm_up(rows=[4])
    compiled, prompt = all_compiled(engine), [5, 6, 7]
    for count in (1, 2, 3, 4):
        generations = engine.add_all([prompt] * count, [SamplingParams(max_tokens=8)] * count)
        engine.finish(generations)
    first = generations[0]
    assert all_compiled(engine) == compiled
    engine.add(prompt, SamplingParams(max_tokens=8))
    engine.on_launch = fail
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.on_launch = None
    engine.finish([again := engine.add(prompt, SamplingParams(max_tokens=8))])
    assert again.token_ids == first.token_ids


def programs_of(layers: tuple[int, ...], rows: int) -> PipelinePrograms:
    engine = Engine(staged(one_device("ngram"), layers), CACHE, EngineConfig(max_rows=rows))
    assert isinstance(engine.programs, PipelinePrograms)
    return engine.programs


def test_rows_are_in_groups_of_one_size_and_found_again():
    programs = programs_of((2, 1, 1), rows=8)
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 4, 8):
        for real in range(1, count + 1):
            rows = np.full(count, 8, np.int32)
            rows[:real] = rng.permutation(8)[:real]
            for listed in (rows, rng.permutation(rows)):
                groups, places = programs._groups(listed)
                assert {len(group) for group in groups} == {-(-count // 3)}
                assert all((group < 8).any() for group in groups[1:])
                found = np.concatenate(groups)[places]
                assert found[listed < 8].tolist() == listed[listed < 8].tolist()


def test_layers_are_split_so_that_the_slowest_stage_is_fast():
    assert split_layers([1.0] * 8, 0.0, 2) == (4, 4)
    assert split_layers([1.0] * 8, 2.0, 2) == (5, 3)
    assert split_layers([1.0] * 8, 20.0, 2) == (8, 0)
    assert split_layers([3.0, 1.0, 1.0, 1.0], 0.0, 2) == (1, 3)
    assert split_layers([1.0] * 5, 1.0, 1) == (5,)
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs, stages = rng.uniform(1, 3, size=6), int(rng.integers(2, 5))
        split = split_layers(costs.tolist(), 2.5, stages)
        assert sum(split) == 6 and len(split) == stages and min(split[:-1]) >= 1
        best = min(slowest(costs, other) for other in all_splits(6, stages))
        assert slowest(costs, split) == pytest.approx(best)


def test_no_stage_begins_with_a_layer_that_attends_to_what_another_chose():
    assert split_layers([1.0] * 8, 0.0, 2, frozenset({4, 5})) == (3, 5)
    assert split_layers([1.0] * 4, 0.0, 4, frozenset({2})) == (1, 2, 1, 0)
    with pytest.raises(ValueError, match="split over 4 stages: they can over 1 to 3"):
        split_layers([1.0] * 4, 0.0, 4, frozenset({2, 3}))


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    if stages == 1:
        return [(layers,)]
    return [
        (count, *rest)
        for count in range(1, layers + 1)
        for rest in all_splits(layers - count, stages - 1)
    ]


def slowest(costs: np.ndarray, split: tuple[int, ...]) -> float:
    ends = np.cumsum(split)
    sums = [costs[end - count : end].sum() for end, count in zip(ends, split, strict=True)]
    return max(*sums[:-1], sums[-1] + 2.5)


def test_stages_wait_as_a_pipeline_is_filled_and_emptied_and_for_missing_rows():
    use = PipelineUse(stages=4)
    assert use.bubble == 0
    use.add(groups=4, rounds=1)
    assert use.bubble == pytest.approx(3 / (4 + 3)), "(S - 1) / (M + S - 1)"
    use = PipelineUse(stages=4)
    use.add(groups=4, rounds=8)
    assert use.bubble == pytest.approx(3 / (32 + 3)), "rounds follow each other without a gap"
    use = PipelineUse(stages=2)
    use.add(groups=1, rounds=8)
    assert use.bubble == pytest.approx(1 / 2), "a single row is in one stage at a time"


def test_an_engine_says_how_busy_its_stages_were(two_stages: Engine):
    engine = two_stages
    assert engine.programs.pipeline is not None
    engine.finish(engine.add_all(PROMPTS[:2], SAMPLING[:2]))
    assert 0 < engine.programs.pipeline.bubble < 0.5
    busy = engine.programs.pipeline.busy
    for key in [one for one in engine.programs.ready if isinstance(one, RoundsKey)]:
        engine.programs.ready.remove(key)
        engine.programs.prepare_rounds(key)
    assert engine.programs.pipeline.busy == busy > 0, "compiling is no work"
    assert Engine(one_device("ngram"), CACHE, EngineConfig(max_rows=2)).programs.pipeline is None


def test_what_a_pipeline_cannot_do_is_said_before_anything_runs():
    params = staged(one_device("ngram"), (2, 2))
    with pytest.raises(ValueError, match=r"run it in a jaxspec\.Engine"):
        params.check(init_state(params.last_stage, 1, 16))
    with pytest.raises(ValueError, match="deterministic=True runs on one device"):
        Engine(params, CACHE, EngineConfig(deterministic=True))
    with pytest.raises(ValueError, match="leave fixed_rounds out"):
        Engine(params, CACHE, EngineConfig(fixed_rounds=False))
    engine = Engine(params, CACHE, EngineConfig(max_rows=2))
    with pytest.raises(ValueError, match="make a new engine"):
        engine.use_target(DEEP, in_flight="restart")
    assert engine.weights.pending is None and not engine.scheduler.holds
    engine.use_drafter(engine.params.drafter)


@pytest.mark.parametrize(
    ("layers", "stages", "message"),
    [
        ((2, 1), 2, "layers 2,1 are 3 together, the model has 4"),
        ((2, 2), 3, "layers 2,2 are of 2 stages, there are 3"),
        ((0, 4), 2, "every stage but the last needs at least one"),
    ],
)
def test_layers_that_are_no_split_of_the_model(layers: tuple[int, ...], stages: int, message: str):
    with pytest.raises(ValueError, match=message):
        check_layers(layers, DEEP.config, stages)


def test_meshes_with_stages_that_do_not_fit():
    with pytest.raises(ValueError, match=r"pp 9 needs 9 devices.*pp 8 fits"):
        make_mesh(pipeline_parallel=9)
    sizes: list[tuple[TensorParallel, int, int]] = [(1, 2, 1), ((2, 2), 1, 1), (1, 1, 2)]
    for model, data, sequence in sizes:
        with pytest.raises(ValueError, match="pp 2 goes with tp N alone"):
            make_mesh(model, data, sequence_parallel=sequence, pipeline_parallel=2)
    mesh = make_mesh(2)
    with pytest.raises(ValueError, match=r"devices \[0, 1\] of the target"):
        stage_meshes(mesh, mesh)
    with pytest.raises(ValueError, match="goes with tp N and pp alone"):
        stage_meshes(make_mesh(1, 2), make_mesh(devices=list(mesh.devices.flat[:1])))
    with pytest.raises(ValueError, match="5 stages"):
        split_layers([1.0] * 3, 0.0, 5)
