"""Serving a workload and measuring it, on tiny models."""

import dataclasses

import numpy as np
import pytest
from pytest import approx

from jaxspec.commands.bench import serving as bench_serving
from jaxspec.commands.shared.shell import collect_parts
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.evaluation.benchmarks import workloads
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.evaluation.benchmarks.vocabulary import synthetic_tokenizer
from jaxspec.evaluation.benchmarks.workloads import Arrival
from jaxspec.evaluation.engine_load import Arrivals, DeviceWatch
from jaxspec.evaluation.load_test import LoadTest, percentiles
from jaxspec.parallel import replica_meshes
from jaxspec.scheduling.balancer import Balancer
from tests.helpers.json_lines import joined
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params

TINY = ["--shape", "tiny", "--page-size", "8", "--dtype", "float32"]
FIGURES = {"first_token", "between_tokens", "between_deliveries"}


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's shape ``tiny`` has two layers."""
    tiny = SHAPES["tiny"]
    small = dataclasses.replace(tiny, layers=tiny.layers[:2])
    monkeypatch.setattr(bench_serving, "SHAPES", {"tiny": small})


def test_a_workload_is_served_and_measured():
    params = make_params("ngram", SpeculationConfig.chain(2))
    engine = Engine(params, CacheConfig(page_size=8, max_length=64), EngineConfig(max_rows=2))
    times, shared = workloads.arrival_times(7, 20.0, seed=0), (1,) * 24
    arrivals = [Arrival(time, (*shared, 7 * i), 4 + i) for i, time in enumerate(times)]
    test = LoadTest([engine], arrivals)
    test.warm_up()
    result = test.run()
    assert (result.requests, result.failed, result.compiled) == (7, 0, 0)
    assert result.prompt_tokens == 7 * 25 and result.generated_tokens == sum(range(4, 11))
    assert result.seconds >= times[-1]
    assert result.generated_per_second == pytest.approx(result.generated_tokens / result.seconds)
    assert result.total_per_second > result.generated_per_second
    for name in FIGURES:
        low, middle, high = getattr(result, name).values()
        assert 0 <= low <= middle <= high
    assert result.between_deliveries["p99"] <= result.longest_gap
    assert 0 <= result.without_requests <= result.device_idle < 1
    assert 0 < result.kv_used <= 1 and 0 <= result.kv_waste < 1
    # All but the first find the prefix, of which 3 full pages were read once.
    assert result.prompt_hits == pytest.approx(6 * 24 / (7 * 25))
    assert 1 <= result.tokens_per_round <= 3 and len(result.accepted_by_depth) == 2
    assert sum(result.preemptions.values()) == 0
    assert list(result.rounds_by_shape) == ["chain:2"]


@pytest.mark.slow
def test_engines_side_by_side_share_a_workload():
    """Each on a device of its own, with about half of the requests.

    By default test_a_workload_is_served_and_measured has one engine,
    test_a_request_goes_to_an_engine_when_its_time_has_come places requests on two, and
    serving/test_replicas.py runs two."""
    wide = make_params("ngram", SpeculationConfig.chain(2))
    engines = [
        Engine(
            on_mesh(wide, mesh),
            CacheConfig(page_size=8, max_length=64),
            EngineConfig(max_rows=2, rounds_per_call=4),
        )
        for mesh in replica_meshes(2)
        if mesh is not None
    ]
    arrivals = [Arrival(0.0, (7 * index,) * 5, 4 + index) for index in range(6)]
    test = LoadTest(engines, arrivals)
    test.warm_up()
    result = test.run()
    assert (result.requests, result.failed, result.compiled) == (6, 0, 0)
    assert (result.prompt_tokens, result.generated_tokens) == (6 * 5, sum(range(4, 10)))
    shares = [len(load.clients) for load in test._loads]
    assert sum(shares) == 6 and min(shares) >= 2
    assert 0 < result.kv_used <= 1 and 0 <= result.device_idle < 1
    assert result.preemptions == {"recompute": 0, "swap": 0}


def test_a_request_goes_to_an_engine_when_its_time_has_come():
    """And to the one with fewer of them then."""
    coming = [Arrival(time, (index,), 4) for index, time in enumerate((0.0, 1.0, 1.0, 2.0))]
    arrivals = Arrivals(coming, Balancer(2, slack=1), 2)
    assert arrivals.next_time(0) == arrivals.next_time(1) == 0
    [(first, number, share)] = arrivals.take(0, 0.5)
    assert (first, number) == (coming[0], 0) and arrivals.take(1, 0.5) == []
    assert arrivals.next_time(1) == 1
    assert [taken[0] for taken in arrivals.take(1, 1.5)] == [coming[1]]
    assert arrivals.next_time(0) == 1  # placed by the other engine's thread
    assert [taken[1] for taken in arrivals.take(0, 1.5)] == [2]
    arrivals.end(share)
    arrivals.end(share)
    assert [taken[0] for taken in arrivals.take(0, 2.0)] == [coming[3]]
    assert arrivals.next_time(0) is arrivals.next_time(1) is None


def test_the_device_is_idle_between_calls():
    with DeviceWatch() as watch:
        pass
    watch.calls = [(1.0, 3.0), (2.0, 5.0), (6.0, 8.0)]  # the second was launched during the first
    assert watch.idle(0.0, 9.0) == 1 + 1 + 1
    assert watch.idle(1.0, 8.0) == 1


def test_percentiles():
    assert percentiles(list(range(101))) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == {"p50": 0, "p90": 0, "p99": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_the_command_prints_a_table_and_json(capsys):
    counts = ["--requests", "1,6", "--rows", "2", "--prompt-tokens", "12", "--new-tokens", "10"]
    more = ["--tree", "chain:2@2", "--load", "0.5", "--load-requests", "3", "--shared-prefix", "16"]
    outputs = ["--compare", "plain", "--bare", "--json"]
    assert bench_serving.main([*TINY, *counts, *more, *outputs]) == 0
    printed = capsys.readouterr()
    runs = joined(printed.out, "runs")["runs"]
    assert [run["mode"] for run in runs] == 3 * ["speculative"] + 3 * ["plain"]
    assert [run["requests"] for run in runs] == 2 * [1, 6, 3]
    for run in runs:
        assert run["failed"] == run["compiled"] == 0
        assert (run["prompt_hits"] > 0.1) == (run["requests"] > 2)
        assert run["tokens_per_round"] == (1 if run["mode"] == "plain" else approx(2, abs=0.5))
        assert (run["rate"] is None) == (run["requests"] != 3)
    assert [run["bare"]["total_per_second"] > 0 for run in runs if "bare" in run] == [True, True]
    assert "tiny, speculative, 2 rows" in printed.err and "tiny, plain, 2 rows" in printed.err
    assert "device idle" in printed.err and "compiled after warm-up" in printed.err


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_adaptive_shapes_beside_the_fixed_one(capsys):
    counts = ["--requests", "6", "--rows", "2", "--prompt-tokens", "12", "--new-tokens", "10"]
    more = ["--tree", "chain:2@2", "--adaptive", "--compare", "fixed", "--json"]
    assert bench_serving.main([*TINY, *counts, *more]) == 0
    printed = capsys.readouterr()
    runs = joined(printed.out, "runs")["runs"]
    assert [run["mode"] for run in runs] == ["adaptive", "fixed"]
    assert set(runs[0]["rounds_by_shape"]) <= {"plain", "chain:1", "chain:2"}
    assert list(runs[1]["rounds_by_shape"]) == ["chain:2"]
    assert all(run["requests"] == 6 and run["compiled"] == 0 for run in runs)


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_a_workload_on_devices_that_share_sequences(capsys):
    counts = ["--requests", "3", "--rows", "2", "--prompt-tokens", "12", "--new-tokens", "10"]
    devices = ["--tp", "2", "--sp", "2", "--dp", "2"]
    assert bench_serving.main([*TINY, *counts, "--tree", "chain:2@2", *devices, "--json"]) == 0
    [run] = joined(capsys.readouterr().out, "runs")["runs"]
    assert (run["generated_tokens"], run["failed"], run["compiled"]) == (30, 0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_structured_requests_beside_none(capsys):
    counts = ["--requests", "4", "--rows", "4", "--prompt-tokens", "12", "--new-tokens", "24"]
    more = ["--tree", "chain:2@2", "--structured", "0,1", "--json"]
    assert bench_serving.main([*TINY, *counts, *more]) == 0
    printed = capsys.readouterr()
    without, beside = joined(printed.out, "runs")["runs"]
    assert (without["structured"], beside["structured"]) == (0, 1)
    assert without["requests"] == beside["requests"] == 4  # a failed grammar would end one
    assert without["generated_tokens"] == beside["generated_tokens"] == 4 * 24
    assert without["unstructured_seconds"] == approx(without["seconds"])
    assert without["structured_between_tokens"]["p50"] == 0
    assert beside["structured_between_tokens"]["p50"] > 0
    assert "beside" not in without
    own, other = beside["unstructured_per_second"], without["unstructured_per_second"]
    assert beside["beside"]["unstructured_per_second"] == approx(own / other)
    assert "requests with structured output" in printed.err


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_a_shared_prefix_with_and_without_the_cache(capsys):
    counts = ["--requests", "5", "--rows", "2", "--prompt-tokens", "3", "--new-tokens", "6"]
    more = ["--tree", "chain:2@2", "--shared-prefix", "64", "--compare", "plain,uncached", "--json"]
    assert bench_serving.main([*TINY, *counts, *more]) == 0
    runs = joined(capsys.readouterr().out, "runs")["runs"]
    assert [(run["mode"], run["prefix_cache"]) for run in runs] == [
        ("speculative", True), ("speculative", False), ("plain", True), ("plain", False)
    ]  # fmt: skip
    assert [run["prompt_hit_tokens"] for run in runs] == [4 * 64, 0, 4 * 64, 0]
    assert [run.get("beside", {}).get("run") for run in runs] == [
        None, "speculative, 5 at once", None, "plain, 5 at once"
    ]  # fmt: skip
    for cached, run in (runs[:2], runs[2:]):
        ratio = run["first_token"]["p50"] / cached["first_token"]["p50"]
        assert run["beside"]["first_token"]["p50"] == approx(ratio)


def test_a_run_that_is_cut_off_leaves_its_finished_parts(capsys):
    def parts():
        yield {"device": "cpu", "runs": [1]}
        yield {"device": "cpu", "runs": [2]}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_parts(parts(), "runs", as_json=True)
    assert joined(capsys.readouterr().out, "runs") == {"device": "cpu", "runs": [1, 2]}


def test_parts_are_one_result(capsys):
    parts = [{"seconds": 1, "runs": [1]}, {"seconds": 2, "runs": [2, 3]}]
    assert collect_parts(parts, "runs", as_json=False) == {"seconds": 2, "runs": [1, 2, 3]}
    assert not capsys.readouterr().out


@pytest.mark.parametrize("vocab_size", [128, 1000])
def test_made_up_words_spell_a_json_string_in_any_order(vocab_size: int):
    end, string = vocab_size - 1, StructuredOutput(json_schema={"type": "string", "minLength": 99})
    compiler = GrammarCompiler(synthetic_tokenizer(vocab_size), vocab_size, [end])
    matcher = compiler.matcher(string)

    def allowed() -> np.ndarray:
        return np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))

    (quote,) = allowed()
    matcher.advance([int(quote)])
    inside = allowed()
    assert set(range(vocab_size)) - set(inside) == {quote, end}
    matcher.advance(np.random.default_rng(0).permutation(inside)[:40].tolist())
    assert not matcher.complete


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="at least 128 tokens"):
        synthetic_tokenizer(100)
