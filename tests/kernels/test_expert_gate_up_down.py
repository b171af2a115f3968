"""Gate, up and down of chosen experts in one launch: the kernel interpreted, lowered, run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kernel_axes
from pallas_kernels.expert_gate_up_down import expert_gate_up_down, misfit
from pallas_kernels.expert_gate_up_down.cases import TEST_CASES, Case, make_arguments
from pallas_kernels.expert_gate_up_down.mosaic_gpu import expert_gate_up_down_mosaic
from pallas_kernels.expert_gate_up_down.plan import PHASES, ROWS, TILE, WARPS, Plan, Tuning
from pallas_kernels.expert_gate_up_down.products import (
    SPAN,
    first_operand,
    row_chunk,
    unit_place,
    weight_chunk,
)
from pallas_kernels.expert_slots import make_slots
from pallas_kernels.packed_expert_product.order import stored_order
from pallas_kernels.packed_expert_product.widening import float8_pairs
from pallas_kernels.packed_experts import numbers_of
from tests.helpers.expert_products import assert_exact
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import slow
from tests.helpers.warp_products import LANES, in_shared_memory, loaded, numbers, product

SMALL = TEST_CASES[0]
MEETING = jax.ShapeDtypeStruct((1, 1), jnp.int32)


@functools.lru_cache(maxsize=len(TEST_CASES))
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
        (TEST_CASES[1], Tuning(stages=3, blocks=5)),
        (TEST_CASES[2], Tuning(stages=2, blocks=6)),
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


@pytest.mark.parametrize("units", [512, 768])
def test_thread_blocks_have_each_job_once(units: int):
    """Whatever the number of slots with an expert. Equally long jobs of both products are divided
    evenly, too."""
    blocks, filled = 132, np.array([0, 1, 3, 9, 65])
    plan = Plan(
        rows=8,
        slots=72,
        num_experts=257,
        hidden=2048,
        units=units,
        scaled=(128, 128),
        tuning=Tuning(blocks=blocks),
        names=PHASES,
        interpret=False,
    )

    def of_block(_: jax.Array, filled: jax.Array) -> Any:
        return [(*plan.own_jobs(at, filled), plan.steps_before(at, filled)) for at in range(2)]

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
        (dataclasses.replace(SMALL, form="mxfp4"), "weights of other than 8-bit floats"),
        (dataclasses.replace(SMALL, form="mxfp8"), "blocks of (1, 32)"),
    ],
)
def test_it_says_what_it_cannot_take(case: Case, message: str):
    x, _, *rest = jax.eval_shape(lambda: make_arguments(case))
    problem = misfit(x, *rest)
    assert problem is not None and message in problem


def test_without_a_place_to_meet_it_does_not_run():
    arguments = jax.eval_shape(lambda: make_arguments(SMALL))
    with pytest.raises(ValueError, match="no place to meet"):
        jax.eval_shape(
            functools.partial(expert_gate_up_down, implementation="mosaic_gpu"), *arguments
        )
