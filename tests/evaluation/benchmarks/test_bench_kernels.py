"""Timing of kernels on tiny cases; the figures are for a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec.commands.bench import kernels as bench_kernels
from jaxspec.evaluation.benchmarks.kernels import (
    Peaks,
    Plan,
    compile_benchmark,
    relative_error,
    time_benchmark,
)
from pallas_kernels.benchmark import Benchmark
from pallas_kernels.delta_rule.cases import BENCHMARK_ROUNDS
from pallas_kernels.paged_attention.cases import (
    TEST_CASES,
    benchmarks,
    float8_benchmarks,
    partial_benchmarks,
)
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from tests.helpers.json_lines import joined

TREE = next(case for case in TEST_CASES if case.name == "small tree")
HALF = dataclasses.replace(TREE, name="half tree")
BYTES = dataclasses.replace(TREE, name="tree of bytes")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one query", "small tree", "half tree", "tree of bytes"])
def test_every_kernel_is_timed_beside_its_reference(name, monkeypatch, capsys):
    cases = [
        *benchmarks([TEST_CASES[0], TREE]),
        *partial_benchmarks([HALF]),
        *float8_benchmarks([BYTES]),
    ]
    monkeypatch.setattr(bench_kernels, "OPERATIONS", {"paged_attention": lambda: cases})
    arguments = ["--json", "--repeats", "1", "--seconds", "1e-3", "--only", name]
    assert bench_kernels.main(arguments) == 0
    printed = capsys.readouterr()
    results = joined(printed.out, "timings")
    [row] = results["timings"]
    assert (row["operation"], row["case"]) == ("paged_attention", name)
    assert row["us"] > 0 and row["reference_us"] > 0
    assert 0 < row["error"] < 0.02 and 0 < row["reference_error"] < 0.02
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
    assert row["share_of_floor"] == pytest.approx(row["floor_us"] / row["us"])
    assert f"compiled 1/1 paged_attention: {name}" in printed.err
    assert name in printed.err and "% of floor" in printed.err


def test_recurrent_layers_are_timed_at_these_sizes():
    sizes = {(one.case.batch, one.case.nodes) for one in BENCHMARK_ROUNDS}
    assert sizes == {(b, n) for b in (1, 8, 32) for n in (1, 2, 4, 8, 16, 32, 64)}
    names = [benchmark.name for benchmark in bench_kernels.OPERATIONS["delta_rule"]()]
    assert all(f"{kind} {b} x {n} nodes" in names for kind in ("read", "round") for b, n in sizes)


def test_every_call_is_fed_by_the_one_before_and_sets_rotate():
    seen = []

    def double(x: jax.Array, offset: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x, offset: seen.append((float(x), float(offset))), x, offset)
        return 2 * x + offset

    benchmark = Benchmark(
        name="doubling",
        make_arguments=lambda seed: (jnp.float32(1), jnp.float32(seed)),
        call=double,
        reference=double,
        feed=lambda arguments, output: (output, *arguments[1:]),
        num_bytes=8,
        flops=2,
        implementation="reference",
    )
    plan = Plan(rotation_bytes=3 * 8, seconds=1e-9, repeats=1)
    peaks = Peaks(1e9, 1e9)
    timing = time_benchmark(compile_benchmark(benchmark, peaks, plan), peaks, plan)
    jax.effects_barrier()
    assert timing.error == 0 and timing.bound == "memory"
    after = 3  # calls of the program of errors
    assert seen[after : after + 9] == expected_chain(sets=3, calls=9)


def expected_chain(sets: int, calls: int) -> list[tuple[float, float]]:
    """A call over set 0, then the chain from set 0 on."""
    found, x = [], 1.0
    for index in [0, *range(calls - 1)]:
        found.append((x, float(index % sets)))
        x = 2 * x + index % sets
    return found


def test_bytes_and_flops_of_attention():
    case = AttentionCase("", (100, 20), 3, 8, 2, 16, 16, window=64, first_slot=1)
    slots = 64 + 19 + 2 * 3
    assert case.num_bytes == 2 * 16 * (2 * 2 * slots + 2 * 2 * 3 * 8)
    assert case.flops == 4 * 3 * 8 * 16 * slots
    queries = 2 * 3 * 8
    half = slots * 2 * 16 * 2 + queries * 16 * (2 + 4) + queries * 4
    assert case.num_partial_bytes(2) == half


HALVING = Benchmark(
    name="halving",
    make_arguments=lambda seed: (jnp.float32(1),),
    call=lambda x: x / 2,
    reference=lambda x: x / 2,
    feed=lambda arguments, output: (output,),
    num_bytes=8,
    flops=1,
    implementation="reference",
    reference_seconds=1e-3,
)


def test_a_slow_reference_is_called_less_often():
    plan = Plan(rotation_bytes=0, seconds=3.2e-2, repeats=1)
    compiled = compile_benchmark(HALVING, Peaks(1e9, 1e9), plan)
    assert (compiled.calls, compiled.reference_calls) == (1 + 3200, 1 + 32)


def test_the_reference_may_be_left_out(monkeypatch, capsys):
    monkeypatch.setattr(bench_kernels, "OPERATIONS", {"numbers": lambda: [HALVING]})
    assert bench_kernels.main(["--skip-reference", "--json", "--seconds", "1e-5"]) == 0
    [row] = joined(capsys.readouterr().out, "timings")["timings"]
    assert row["us"] > 0 and row["reference_us"] is row["error"] is None


def test_the_longer_of_two_floors_counts():
    chain, tree = (
        next(b for b in benchmarks() if b.name == f"8 x 8k, {queries} queries, page 64")
        for queries in (8, 64)
    )
    peaks = Peaks(bandwidth=3e12, product_rate=500e12)
    assert peaks.floor(chain) == (chain.num_bytes / 3e12, "memory")
    assert peaks.floor(tree) == (tree.flops / 500e12, "compute")


def test_relative_error_is_that_of_the_worst_result():
    values, indices = jnp.array([3.0, 4.0]), jnp.full(2, 50_000)  # whose squares overflow an int32
    wrong = jnp.zeros(2)
    assert relative_error((wrong, indices), (values, indices)) == pytest.approx(1)
    assert relative_error((values, wrong), (values, wrong)) == 0


def test_relative_error():
    assert relative_error(jnp.array([3.0, 4.0]), jnp.array([3.0, 0.0])) == pytest.approx(4 / 3)
