"""expert_product against the products in float64; its slots; and what a row gets beside others."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.config.experts import (
    BoundedSwiglu,
    ClampedSwiglu,
    ExpertsConfig,
    LimitedSwiglu,
    RoutingConfig,
)
from jaxspec.models.activations import clamp_of
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass, make_pass
from jaxspec.models.mlps import mix
from jaxspec.models.mlps.experts import experts_shape
from jaxspec.models.mlps.routing import Routes
from jaxspec.parallel import WHOLE, Layout, Shards, make_mesh, mesh_layout, partition_specs
from pallas_kernels.activations import Gelu
from pallas_kernels.expert_product import expert_product, misfit
from pallas_kernels.expert_product.cases import (
    BENCHMARK_CASES,
    TEST_CASES,
    Case,
    chosen_experts,
    make_arguments,
)
from pallas_kernels.expert_product.mosaic_gpu import expert_product_mosaic
from pallas_kernels.expert_product.tuning import ExpertTuning
from pallas_kernels.expert_slots import MOST_ROWS, make_slots, num_lanes
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.expert_products import assert_exact
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.random_experts import random_own, random_rows, written_out
from tests.helpers.random_models import random_arrays

# The first one uses each part of its ring again, even in the smallest cases.
INTERPRETED = (ExpertTuning(most_stages=2), ExpertTuning(block=128, ctas=1))
# What is lowered and run besides: two warpgroups for each producer, longer blocks, one CTA.
VARIANTS = (
    ExpertTuning(warpgroups=2),
    ExpertTuning(block=128),
    ExpertTuning(ctas=1),
    ExpertTuning(ctas=3),
)


@functools.lru_cache(maxsize=len(TEST_CASES))
def arguments_of(case: Case) -> Any:
    """make_arguments in one program, instead of one for each of its operations."""
    return jax.jit(lambda: make_arguments(case))()


def run_interpreted(arguments: Any, case: Case, config: ExpertTuning | None = None) -> Any:
    how: Any = {"clamp": case.clamp, "config": config, "detect_races": True}
    return interpreted(expert_product_mosaic, *arguments, **how)


# The last is large, for the kernel's sake: the reference is the same for all.
@pytest.mark.parametrize("case", [*TEST_CASES[:-1], slow(TEST_CASES[-1])], ids=str)
def test_the_reference_is_the_product(case: Case):
    arguments = arguments_of(case)
    function = jax.jit(functools.partial(expert_product, clamp=case.clamp))
    assert_exact(function(*arguments), case, arguments)


@first_is_fast(TEST_CASES)
@pytest.mark.parametrize("config", [INTERPRETED[0], slow(None), slow(INTERPRETED[1])], ids=str)
def test_interpreted_it_is_the_product(case: Case, config: ExpertTuning | None):
    arguments = arguments_of(case)
    assert_exact(run_interpreted(arguments, case, config), case, arguments)


@pytest.mark.slow
def test_interpreted_two_warpgroups_multiply():
    case = Case(12, 2, 4, 128, 128, biased=True)
    arguments = arguments_of(case)
    assert_exact(run_interpreted(arguments, case, ExpertTuning(warpgroups=2)), case, arguments)


@pytest.mark.slow
def test_interpreted_rows_of_prompts_are_multiplied():
    """So many pairs are sorted; some are of experts that other devices have."""
    case = Case(1030, 4, 6, 64, 64, missing=2)
    arguments = make_arguments(case)
    assert_exact(run_interpreted(arguments, case), case, arguments)


@pytest.mark.slow  # by default: every pair has a lane of its own, below
@pytest.mark.parametrize("case", [Case(5, 2, 4, 128, 64), Case(20, 2, 4, 128, 64)], ids=str)
def test_interpreted_a_row_is_the_same_whatever_others_choose(case: Case):
    """Another row of NaN included, and of an expert with weights that no row chose."""
    x, experts, gate_up, down, bias = arguments_of(case)
    x, experts = x.at[1].set(jnp.nan), experts.at[0].set(jnp.array([2, 0]))
    first = run_interpreted((x, experts, gate_up, down, bias), case)[0]
    for seed in (1, 2):
        others, place = chosen_experts(case, seed), 2 + seed
        changed = experts.at[1:].set(others[1:]).at[place].set(experts[0])
        moved = x.at[place].set(x[0]).at[0].set(x[2])
        found = run_interpreted((moved, changed, gate_up, down, bias), case)
        assert jnp.array_equal(found[place], first)


@pytest.mark.parametrize(
    "case",
    [
        *TEST_CASES,
        Case(512, 8, 128, 2048, 768),
        *BENCHMARK_CASES[::3],
        *map(slow, [case for case in BENCHMARK_CASES if case not in BENCHMARK_CASES[::3]]),
    ],
    ids=str,
)
def test_it_lowers_for_cuda(case: Case):
    function = functools.partial(expert_product, clamp=case.clamp, implementation="mosaic_gpu")
    lowered(function, *jax.eval_shape(lambda: make_arguments(case)))


def test_gelu_lowers_for_cuda():
    function = functools.partial(expert_product, clamp=Gelu(), implementation="mosaic_gpu")
    lowered(function, *jax.eval_shape(lambda: make_arguments(TEST_CASES[0])))


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_variants_lower_for_cuda(config: ExpertTuning):
    case = Case(32, 8, 16, 256, 128, biased=True)
    function = functools.partial(expert_product_mosaic, clamp=None, config=config)
    lowered(function, *jax.eval_shape(lambda: make_arguments(case)))


# Of prompts: pairs of the second are sorted.
MANY_ROWS = (Case(512, 8, 32, 128, 64), Case(MOST_ROWS, 2, 32, 128, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, *BENCHMARK_CASES, *MANY_ROWS], ids=str)
@pytest.mark.parametrize("config", [None, *VARIANTS], ids=str)
def test_on_the_device_it_is_the_product(case: Case, config: ExpertTuning | None):
    arguments = arguments_of(case)
    if config is not None and (case.units % config.tile or case.hidden % config.tile):
        pytest.skip("not of these outputs")
    function = jax.jit(functools.partial(expert_product_mosaic, clamp=case.clamp, config=config))
    first = function(*arguments)
    assert_exact(first, case, arguments)
    here = (arguments[1] < case.num_experts)[..., None]
    for _ in range(20):
        assert not jnp.any(here & (first != function(*arguments))), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 8, 32, 128])
def test_on_the_device_a_row_is_the_same_whatever_others_choose(rows: int):
    case = Case(rows, 8, 128, 2048, 768)
    x, experts, gate_up, down, _ = arguments_of(case)
    function = jax.jit(functools.partial(expert_product, implementation="mosaic_gpu"))
    first = function(x, experts, gate_up, down)[0]
    for seed in range(1, 8):
        place = seed % rows
        changed = jnp.asarray(chosen_experts(case, seed)).at[place].set(experts[0])
        moved = x.at[0].set(jnp.nan).at[place].set(x[0])
        assert jnp.array_equal(function(moved, changed, gate_up, down)[place], first)


@pytest.mark.parametrize(
    ("rows", "k", "num_experts", "missing"),
    [
        (1, 8, 128, 0),
        (8, 3, 4, 2),
        (9, 2, 6, 3),
        (33, 4, 8, 0),
        (200, 8, 16, 0),
        (64, 2, 2, 5),
        (4096, 8, 256, 0),  # so many pairs are sorted
        (700, 6, 12, 9),
    ],
)
def test_every_pair_has_a_lane_with_its_row_and_expert(
    rows: int, k: int, num_experts: int, missing: int
):
    slots_of = jax.jit(functools.partial(make_slots, num_experts=num_experts))
    for seed in range(3):
        experts = chosen_experts(Case(rows, k, num_experts, 0, 0, missing=missing), seed)
        own, lane_rows, places = jax.device_get(slots_of(experts))
        lanes = num_lanes(rows, k, num_experts)
        slot, lane = np.asarray(places) // lanes, np.asarray(places) % lanes
        here = experts < num_experts
        if lane_rows is None:
            lane_rows = np.tile(np.arange(lanes), (len(own), 1))
        assert (slot < len(own)).all()
        assert (np.asarray(own)[slot] == experts)[here].all()
        assert (np.asarray(lane_rows)[slot, lane] == np.arange(rows)[:, None])[here].all()
        assert len(np.unique(places[here])) == here.sum(), "two pairs share a lane"
        counts = np.bincount(experts[here], minlength=num_experts)
        shared = rows <= lanes == 8
        filled = (counts > 0).sum() if shared else (-(-counts // lanes)).sum()
        assert (np.asarray(own) < num_experts).sum() == filled


class Interpreted:
    """A ForwardPass whose kernel is interpreted; not of an engine."""

    attend = None

    @staticmethod
    def product(*arguments: Any) -> Any:
        *arrays, activation = arguments
        clamp = activation and clamp_of(activation)
        interpret = plgpu.InterpretGPUParams()
        return expert_product_mosaic(*arrays, clamp=clamp, interpret=interpret)

    def expert_product(self, *arguments: Any) -> Any:
        return jax.block_until_ready(self.product(*arguments))


@pytest.mark.slow  # by default: that of test_packed_expert_product.py
@pytest.mark.parametrize(
    "case",
    [
        (8, 3, 5, 64, ClampedSwiglu(1.7, 1.0)),
        (8, 2, 24, 64, None),
        (8, 3, 5, 64, LimitedSwiglu(0.2)),
        (8, 3, 5, 64, BoundedSwiglu(0.2)),
        (8, 3, 5, 64, "gelu_tanh"),
    ],
    ids=str,
)
def test_a_mixture_by_the_kernel_is_what_is_written_out(case: Any):
    """On two devices that have half of the experts each."""
    num_experts, k, rows, units, activation = case
    own = random_own(num_experts, 128, units, activation)
    whole = own.replace(gate_up=narrow(own.gate_up), down=narrow(own.down))
    x, routes = random_rows(rows, 128, num_experts, k, seed=1)
    x = jnp.asarray(x, jnp.bfloat16)
    step: Any = Interpreted()
    half, total = num_experts // 2, 0
    for first in (0, half):
        part = jax.tree.map(lambda leaf, first=first: leaf[first : first + half], whole.gate_up)
        down = jax.tree.map(lambda leaf, first=first: leaf[first : first + half], whole.down)
        device = whole.replace(gate_up=part, down=down, first=first)
        found = mix.by_kernel(device, x, routes, step)
        assert found is not None
        total = total + found
    expected = written_out(whole, np.asarray(x, np.float64), routes)
    error = np.linalg.norm(np.asarray(total) - expected)
    assert error <= 3e-3 * np.linalg.norm(expected)  # of hidden units, which are rounded


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 24])
def test_devices_add_what_their_kernels_multiply(rows: int, monkeypatch: pytest.MonkeyPatch):
    """A layer of experts on a mesh of two devices, each of which runs the interpreted kernel.

    The interpreter has one memory for all devices: where one has ended, it takes the barriers of
    the other for forgotten ones. So that check is left out.
    """
    callbacks = "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"
    check = f"{callbacks}.call_assert_no_barriers_allocated"
    monkeypatch.setattr(check, lambda token: token)
    config = ExpertsConfig(64, RoutingConfig(4, 2, normalize=True), shared_size=32)
    mesh = make_mesh(2)
    layout = mesh_layout(mesh)
    shapes = experts_shape(config, 128, jnp.dtype("bfloat16"), Shards())
    layer = random_arrays(shapes, seed=0)
    x = np.random.default_rng(1).standard_normal((1, rows, 128), np.float32).astype(jnp.bfloat16)
    asked = []

    def product(self: Any, *arguments: Any) -> Any:
        asked.append(arguments[2].shape)
        return Interpreted.product(*arguments)

    def run(mlp: Any, x: Any, layout: Layout) -> Any:
        positions = jnp.zeros((1, rows), jnp.int32)
        step = make_pass((), positions, dense_causal_attend, 1e-5, layout, NO_KERNELS)
        return mlp(x, step).partial_sums(layout, NO_KERNELS, lambda dtype, width: False)[0]

    expected = np.asarray(run(layer, x, WHOLE), np.float64)
    monkeypatch.setattr(ForwardPass, "expert_product", product)
    split = jax.shard_map(
        functools.partial(run, layout=layout),
        mesh=mesh,
        in_specs=(partition_specs(layer, layout), P()),
        out_specs=P(),
        check_vma=False,
    )
    found = np.asarray(jax.block_until_ready(jax.jit(split)(layer, x)), np.float64)
    assert asked == [(2, 128, 2, 64)], "each device multiplies by its own experts"
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)  # of bfloat16


def narrow(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def test_a_mixture_takes_the_kernel_where_it_fits():
    kernels = Kernels(frozenset({"expert_product"}))

    def calls(rows: int, dtype: Any, chosen: Kernels = kernels) -> int:
        own = random_own(8, 128, 64, None)
        if dtype == jnp.bfloat16:
            own = own.replace(gate_up=narrow(own.gate_up), down=narrow(own.down))
        x, routes = random_rows(rows, 128, 8, 2, seed=0)
        positions = jnp.zeros((1, rows), jnp.int32)
        step = make_pass((), positions, dense_causal_attend, 1e-5, WHOLE, chosen)
        call = jax.jit(lambda x, routes: mix.mix(own, x, routes, 8, step))
        lowered = call.trace(jnp.asarray(x, dtype), Routes(*routes)).lower(
            lowering_platforms=("cuda",)
        )
        return lowered.as_text().count("custom_call @mosaic_gpu")

    assert calls(3, jnp.bfloat16) == calls(512, jnp.bfloat16) == 2
    assert calls(3, jnp.float32) == calls(513, jnp.bfloat16) == 0
    assert calls(3, jnp.bfloat16, Kernels()) == 0


def test_unsupported_arguments_are_named():
    for case, message in [
        (Case(4097, 2, 4, 64, 64), "4097 rows: at most 4096"),
        (Case(2, 2, 4, 96, 64), "96 inputs and 64 hidden units: multiples of 64"),
    ]:
        with pytest.raises(ValueError, match=f"the kernel cannot take {message}"):
            expert_product(*make_arguments(case), implementation="mosaic_gpu")
    x, _, gate_up, down, _ = make_arguments(TEST_CASES[0])
    assert "must be bfloat16" in str(misfit(x.astype(jnp.float32), gate_up, down))
