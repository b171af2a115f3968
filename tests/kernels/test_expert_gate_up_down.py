"""Gate, up and down of chosen experts in one launch: the kernel interpreted, lowered, run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kernel_axes
from pallas_kernels.benchmark import noise
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.expert_gate_up_down import expert_gate_up_down, misfit
from pallas_kernels.expert_gate_up_down.cases import TEST_CASES, Case, make_arguments
from pallas_kernels.expert_gate_up_down.choice import of_ordered, ordered
from pallas_kernels.expert_gate_up_down.mosaic_gpu import (
    expert_gate_up_down_mosaic,
    routed_gate_up_down_mosaic,
)
from pallas_kernels.expert_gate_up_down.plan import (
    PHASES,
    ROWS,
    TILE,
    WARPS,
    Kind,
    Plan,
    Stored,
    Tuning,
)
from pallas_kernels.expert_gate_up_down.products import (
    SPAN,
    first_operand,
    row_chunk,
    unit_place,
    weight_chunk,
)
from pallas_kernels.expert_gate_up_down.weights import ExpertWeights, Router
from pallas_kernels.expert_slots import make_slots
from pallas_kernels.packed_expert_product.widening import float8_pairs
from pallas_kernels.packed_experts import numbers_of
from pallas_kernels.packed_order import stored_order
from pallas_kernels.top_k.routes import RouteRule, SharedGate, expert_routes_reference
from tests.helpers.expert_products import assert_exact
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import slow
from tests.helpers.warp_products import LANES, in_shared_memory, loaded, numbers, product

SMALL = TEST_CASES[0]
RULES = [
    RouteRule(8, normalize=True, has_shared=True),
    RouteRule(4, "chosen"),
    RouteRule(3, "sigmoid", normalize=True, scale=2.5, has_shared=True),
    RouteRule(2, has_shared=True),
]
MEETING = jax.ShapeDtypeStruct((1, 1), jnp.int32)


@functools.lru_cache(maxsize=2 * len(TEST_CASES))
def arguments_of(case: Case, seed: int = 0) -> Any:
    return make_arguments(case, seed)


def run(case: Case, seed: int = 0, tuning: Tuning | None = None, **options: Any) -> Any:
    x, _, slots, gate_up, down = arguments_of(case, seed)
    meeting = jnp.zeros(MEETING.shape, jnp.int32)
    given = x, slots, gate_up, down, meeting
    return interpreted(expert_gate_up_down_mosaic, *given, tuning=tuning, **options)


def assert_products(found: Any, case: Case) -> None:
    """Against the products of the widened weights in float64, with hidden units rounded."""
    x, experts, _, gate_up, down = arguments_of(case)
    every = jnp.arange(case.num_experts)
    wide = np.moveaxis(np.asarray(gate_up.of(every)), -1, 1), np.asarray(down.of(every))[:, 0]
    given = x, experts, wide[0], np.swapaxes(wide[1], 1, 2)
    assert_exact(found.by_pair, case, given)


# One thread block has both phases in one launch.
@pytest.mark.slow  # what the phases are made of is tested below
@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (SMALL, Tuning(stages=2, blocks=1)),
        (SMALL, Tuning(blocks=7)),
        (Case(8, 2, 3, 512, 256, missing=2), Tuning(stages=3, blocks=5)),
        (Case(3, 2, 3, 512, 128, form="mxfp8"), Tuning(stages=2, blocks=3)),
        (Case(2, 2, 3, 1024, 256, form="mxfp4"), Tuning(stages=2, blocks=1)),
    ],
    ids=str,
)
def test_interpreted_its_phases_give_the_products(case: Case, tuning: Tuning):
    assert_products(run(case, tuning=tuning, detect_races=True), case)


@pytest.mark.slow  # on the device, below
def test_interpreted_rows_that_choose_nothing_read_no_expert():
    """A slot without an expert is not listed, and the others are as without it."""
    x, experts, slots, gate_up, down = arguments_of(SMALL)
    empty = slots._replace(expert=slots.expert.at[0].set(SMALL.num_experts))
    given = x, empty, gate_up, down, jnp.zeros(MEETING.shape, jnp.int32)
    found = interpreted(expert_gate_up_down_mosaic, *given, tuning=Tuning(stages=2, blocks=2))
    reference = jax.jit(expert_gate_up_down)(x, experts, slots, gate_up, down).by_pair
    error = np.linalg.norm(np.asarray(found.by_pair - reference)[:, 1])
    assert error <= 1e-2 * np.linalg.norm(np.asarray(reference)[:, 1])


@pytest.mark.parametrize("case", [SMALL, *map(slow, TEST_CASES[1:])], ids=str)
def test_it_lowers_for_cuda(case: Case):
    x, _, *rest = jax.eval_shape(lambda: make_arguments(case))
    lowered(expert_gate_up_down_mosaic, x, *rest, MEETING)


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [None, Tuning(stages=2), Tuning(blocks=96)], ids=str)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_on_the_device_it_is_the_product(case: Case, tuning: Tuning | None):
    x, _, *rest = arguments_of(case)
    meeting = jnp.zeros(MEETING.shape, jnp.int32)
    function = jax.jit(functools.partial(expert_gate_up_down_mosaic, tuning=tuning))
    first = function(x, *rest, meeting)
    assert_products(first, case)
    here = np.asarray(arguments_of(case)[1]) < case.num_experts
    for _ in range(50):
        again = function(x, *rest, meeting)
        assert np.array_equal(first.by_pair[here], again.by_pair[here]), "a race"
    assert not meeting.any()


@pytest.mark.gpu
def test_on_the_device_a_row_is_the_same_whatever_stands_beside_it():
    case = TEST_CASES[2]
    x, experts, _, gate_up, down = arguments_of(case)
    meeting = jnp.zeros(MEETING.shape, jnp.int32)

    def products(rows: int) -> np.ndarray:
        slots = make_slots(experts[:rows], case.num_experts)
        found = jax.jit(expert_gate_up_down_mosaic)(x[:rows], slots, gate_up, down, meeting)
        return np.where(experts[:rows, :, None] < case.num_experts, found.by_pair, 0)

    together = products(case.rows)
    for rows in (1, 2, 7):
        assert np.array_equal(products(rows), together[:rows])


@functools.lru_cache(maxsize=2)
def routed_arguments(case: Case, rule: RouteRule) -> Any:
    """Rows of which the second is padding, a router and a gate; ``case``: with all experts."""
    x, weights = arguments_of(case)[0], expert_weights(case)
    experts = case.num_experts - rule.has_shared
    is_row, wide = jnp.arange(case.rows) != 1, (experts, case.hidden)
    router = noise(0, 7, wide, jnp.bfloat16) * case.hidden**-0.5
    gate = noise(0, 8, (case.hidden,), jnp.bfloat16) * case.hidden**-0.5 if rule.normalize else None
    return x, is_row, Router(router.astype(jnp.bfloat16), gate), weights


def expert_weights(case: Case) -> ExpertWeights:
    """Beside experts of MXFP4 the last one is in FP8 blocks."""
    if case.form != "mxfp4":
        return ExpertWeights(*arguments_of(case)[3:])
    others = dataclasses.replace(case, num_experts=case.num_experts - 1)
    last = dataclasses.replace(case, rows=1, k=1, num_experts=1, form="fp8")
    *_, gate_up, down = arguments_of(others)
    return ExpertWeights(gate_up, down, ExpertWeights(*arguments_of(last, 1)[3:]))


def widened(weights: ExpertWeights) -> tuple[np.ndarray, np.ndarray]:
    """[E, H, 2, F] and [E, F, H], the shared one included."""
    every = jnp.arange(weights.gate_up.num_experts)
    gate_up = np.moveaxis(np.asarray(weights.gate_up.of(every)), -1, 1)
    down = np.swapaxes(np.asarray(weights.down.of(every))[:, 0], 1, 2)
    if weights.shared is None:
        return gate_up, down
    pairs = zip((gate_up, down), widened(weights.shared), strict=True)
    gate_up, down = (np.concatenate(pair) for pair in pairs)
    return gate_up, down


def assert_routed(found: ChosenProducts, case: Case, rule: RouteRule) -> None:
    """As written out: choices by logits in float64, and the products of widened weights."""
    x, is_row, (router, gate), weights = routed_arguments(case, rule)
    wide = [np.asarray(array, np.float64) for array in (x, router)]
    logits = jnp.asarray(wide[0] @ wide[1].T, jnp.float32)[None]
    given = None if gate is None else SharedGate(x, gate)
    chosen, factors = expert_routes_reference(logits, is_row, rule, given)
    here = np.asarray(is_row)
    np.testing.assert_allclose(np.asarray(found.weights)[here], factors[here], rtol=2e-5)
    assert (np.asarray(found.places)[~here] == -1).all()
    given = x[here], chosen[here], *widened(weights)
    k = rule.k + rule.has_shared
    products = found.products[np.asarray(found.places)[here]]
    assert_exact(products, dataclasses.replace(case, rows=int(here.sum()), k=k), given)


def run_routed(case: Case, rule: RouteRule, kernel: Any) -> ChosenProducts:
    x, is_row, *weights = routed_arguments(case, rule)
    meeting = jnp.zeros(MEETING.shape, jnp.int32)
    return kernel(x, is_row.astype(jnp.int32), *weights, meeting, rule=rule)


@pytest.mark.slow  # the arithmetic of threads is not interpreted: on the device, below
@pytest.mark.parametrize(
    ("rows", "rule", "blocks", "form"),
    [
        (1, RULES[0], 2, "fp8"),
        (3, RULES[0], 1, "fp8"),
        (3, RULES[1], 3, "fp8"),
        (3, RULES[0], 1, "mxfp4"),
        (2, RULES[3], 3, "mxfp4"),
    ],
    ids=str,
)
def test_interpreted_rows_choose_their_experts(rows: int, rule: RouteRule, blocks: int, form: str):
    sizes = (512, 128) if form == "fp8" else (1024, 256)
    case = Case(rows, 2, 128 + rule.has_shared, *sizes, form=form)
    kernel = functools.partial(interpreted, routed_gate_up_down_mosaic, tuning=Tuning(2, blocks))
    assert_routed(run_routed(case, rule, kernel), case, rule)


def test_with_the_choice_it_lowers_for_cuda():
    """Of MXFP4, with a shared expert in FP8 blocks."""
    x, *_, gate_up, down = jax.eval_shape(
        lambda: make_arguments(Case(2, 2, 128, 1024, 256, form="mxfp4"))
    )
    last = jax.eval_shape(lambda: make_arguments(Case(2, 2, 1, 1024, 256)))[3:]
    weights = ExpertWeights(gate_up, down, ExpertWeights(*last))
    arrays: Any = (
        jax.ShapeDtypeStruct(*shape)
        for shape in (((128, 1024), jnp.bfloat16), ((1024,), jnp.bfloat16), ((2,), jnp.int32))
    )
    router, gate, is_row = arrays
    kernel = functools.partial(routed_gate_up_down_mosaic, rule=RULES[0])
    lowered(kernel, x, is_row, Router(router, gate), weights, MEETING)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_on_the_device_rows_choose_their_experts(rule: RouteRule, rows: int):
    assert_routed_without_races(Case(rows, 2, 256 + rule.has_shared, 1024, 128), rule)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_on_the_device_the_shared_expert_is_stored_in_another_way(rows: int):
    assert_routed_without_races(Case(rows, 2, 257, 2048, 512, form="mxfp4"), RULES[0])


def assert_routed_without_races(case: Case, rule: RouteRule) -> None:
    function = jax.jit(routed_gate_up_down_mosaic, static_argnames="rule")
    first = run_routed(case, rule, function)
    assert_routed(first, case, rule)
    for _ in range(50):
        again = run_routed(case, rule, function)
        assert np.array_equal(first.places, again.places), "a race"
        assert np.array_equal(first.total(), again.total()), "a race"


@pytest.mark.parametrize("inputs", [512, 256, 128])
def test_a_warp_multiplies_its_part_of_a_block(inputs: int):
    """The arithmetic of the lanes of each warp, on numbers."""
    rng = np.random.default_rng(0)
    stored = np.asarray(
        stored_order(jnp.asarray(rng.integers(0, 127, (TILE, inputs), np.uint8)), "e4m3")
    )
    weights = np.asarray(numbers_of(jnp.asarray(stored), "e4m3"), np.float64)
    memory = in_shared_memory(stored.reshape(2, TILE // 2, -1, 128))
    begin = inputs  # of x, which is longer
    rows = rng.integers(-8, 8, (ROWS, 2 * inputs))
    x = in_shared_memory(rows.astype(jnp.bfloat16).view(np.uint8).reshape(1, ROWS, -1, 128))
    part = inputs // WARPS
    for warp in range(WARPS):
        total = np.zeros((TILE, ROWS))
        for pair in range(part // 32):
            words = loaded(memory, weight_chunk(LANES, warp, pair, inputs))
            span = (begin + warp * part) // SPAN + pair
            columns = [numbers(word) for word in loaded(x, row_chunk(LANES, span))]
            for chunk in range(2):
                wide = [
                    [numbers(each) * 2.0**120 for each in float8_pairs(word)]
                    for word in words[2 * chunk :][:2]
                ]
                total += product(first_operand(wide), columns[2 * chunk :][:2])
        inputs_of_warp = slice(warp * part, (warp + 1) * part)
        expected = weights[:, inputs_of_warp] @ rows[:, begin:][:, inputs_of_warp].T
        assert np.array_equal(total, expected)


def test_a_lane_reads_its_units_side_by_side():
    """Four pairs of a span, those that it multiplies."""
    for lane in range(32):
        row, first = lane // 4, 2 * (lane % 4)
        units = [3 * SPAN + 8 * eight + first + e for eight in range(4) for e in range(2)]
        begin = (3 * ROWS * 4 + lane) * 8
        assert [unit_place(unit, row) for unit in units] == list(range(begin, begin + 8))


def test_integers_have_the_order_of_floats():
    floats = np.array(
        [-np.inf, -3e38, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 2.5, np.inf], np.float32
    )
    keys = ordered(floats.view(np.uint32))
    assert (np.diff(keys.astype(np.int64)) > 0).all() and keys[0] > 0
    assert np.array_equal(of_ordered(keys).view(np.float32), floats)


@pytest.mark.parametrize("units", [512, 768])
def test_thread_blocks_have_each_job_once(units: int):
    """Whatever the number of slots with an expert. Equally long jobs of both products are divided
    evenly, too."""
    blocks, filled = 132, np.array([0, 1, 3, 9, 65])
    plan = Plan(
        rows=8,
        slots=72,
        hidden=2048,
        units=units,
        kinds=(Kind(Stored("e4m3", (128, 128)), 0, 257),),
        tuning=Tuning(blocks=blocks),
        names=PHASES,
        interpret=False,
    )

    def of_block(_: jax.Array, filled: jax.Array) -> Any:
        of_kinds = {"experts": filled}
        return [(*plan.own_jobs(at, of_kinds), plan.steps_before(at, of_kinds)) for at in range(2)]

    name = kernel_axes.name("block")
    of_blocks = jax.vmap(of_block, (0, None), axis_name=name, axis_size=blocks)
    found = jax.jit(jax.vmap(of_blocks, (None, 0)))(jnp.arange(blocks), filled)
    for at, number in enumerate(filled):
        total = np.zeros(blocks, int)
        for phase, parts in zip(plan.phases, found, strict=True):
            first, count, steps_before = (np.asarray(part)[at] for part in parts)
            assert (count >= 0).all() and (steps_before == total).all()
            jobs = [job for f, n in zip(first, count, strict=True) for job in range(f, f + n)]
            assert jobs == list(range(number * phase.jobs))
            total += count * phase.steps
        if units == 512 and number > 3:
            assert max(total) - min(total) <= 1


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (dataclasses.replace(SMALL, rows=9), "9 rows: at most 8"),
        (dataclasses.replace(SMALL, hidden=640), "640 inputs and 128 units: multiples of 512"),
        (dataclasses.replace(SMALL, form="mxfp4"), "512 inputs and 128 units: multiples of 1024"),
        (dataclasses.replace(SMALL, form="nvfp4"), "a factor for each output"),
        (dataclasses.replace(SMALL, form="int4"), "int4 with scales of (1, 32) in bfloat16"),
    ],
)
def test_it_says_what_it_cannot_take(case: Case, message: str):
    x, *_, gate_up, down = jax.eval_shape(lambda: make_arguments(case))
    problem = misfit(x, gate_up, down)
    assert problem is not None and message in problem


def test_without_a_place_to_meet_it_does_not_run():
    arguments = jax.eval_shape(lambda: make_arguments(SMALL))
    with pytest.raises(ValueError, match="no place to meet"):
        jax.eval_shape(
            functools.partial(expert_gate_up_down, implementation="mosaic_gpu"), *arguments
        )
