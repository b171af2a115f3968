"""A layer after its attention in one launch: the kernel interpreted, lowered, run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kernel_axes
from pallas_kernels.o_gate_up_down import (
    float8_products,
    misfit,
    o_gate_up_down,
)
from pallas_kernels.o_gate_up_down.cases import EPS, TEST_CASES, Case, make_arguments
from pallas_kernels.o_gate_up_down.meeting import meeting_shape
from pallas_kernels.o_gate_up_down.mosaic_gpu import o_gate_up_down_mosaic
from pallas_kernels.o_gate_up_down.plan import (
    BLOCK,
    GROUP,
    PHASES,
    ROWS,
    TILE,
    TILES,
    WARPS,
    Plan,
    Tuning,
    splits_of,
)
from pallas_kernels.o_gate_up_down.products import (
    STEP,
    entry_chunk,
    first_operand,
    row_chunk,
    scaled_pairs,
    weight_chunk,
)
from pallas_kernels.packed_product.order import SPAN, input_order, kernel_order
from pallas_kernels.packed_product.widening import HALVES
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.warp_products import LANES, in_shared_memory, loaded, numbers, product

# Relative. Sums are exact to float32, but one that falls between two numbers of 16 bits may be
# rounded to either; results of the MLP are sums over many of those.
ERROR = 1e-3
# Such an entry may be rounded to the next of 8 bits, too. Rounding all of them by another scale
# makes 4e-2.
FLOAT8_ERROR = 5e-3
SMALL = Case(2, 512, 512, 512)
SMALL8 = Case(3, 512, 512, 1536, float8=True)
GROUPS8 = dataclasses.replace(SMALL8, rows=2, groups=True)


@functools.lru_cache(maxsize=len(TEST_CASES))
def arguments_of(case: Case) -> Any:
    """make_arguments in one program, instead of one for each of its operations."""
    if case.float8:  # XLA would round constants, for seconds
        return make_arguments(case)
    return jax.jit(lambda: make_arguments(case))()


def rounded(x: np.ndarray) -> np.ndarray:
    """To bfloat16."""
    return x.astype(jnp.bfloat16).astype(np.float64)


def exact(case: Case) -> tuple[Any, Any]:
    """Both results in float64, but for what is rounded between the products."""
    x, residual, (norm, *weights) = arguments_of(case)
    o, gate_up, down = map(widened, weights)
    group = GROUP if case.groups else None
    multiplied: Any = (
        functools.partial(float8_product, group=group) if case.float8 else plain_product
    )
    total = rounded(np.float64(residual) + rounded(multiplied(np.float64(x), o)))
    normed = exact_norm(total, norm)
    gate, up = np.split(rounded(multiplied(normed, gate_up)), 2, axis=-1)
    return total, multiplied(rounded(gate / (1 + np.exp(-gate)) * up), down)


def plain_product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return x @ weights.T


def float8_product(x: np.ndarray, weights: np.ndarray, group: int | None) -> np.ndarray:
    """Of rows, or groups of their entries, whose largest ones become 448, e4m3's largest number."""
    steps, scale = float8_rows(x.reshape(-1, group or x.shape[1]))
    return (steps * scale).reshape(x.shape) @ weights.T


def float8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows over their scales [M, 1], rounded to numbers of 8 bits."""
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) * np.float32(1 / 448)
    steps = np.clip(x.astype(np.float32) * (1 / scale), -448, 448).astype(jnp.float8_e4m3fn)
    return steps.astype(np.float64), scale


def exact_norm(x: np.ndarray, weight: Any) -> np.ndarray:
    scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return rounded(rounded(x * scale) * np.float64(weight))


def widened(weights: Any) -> np.ndarray:
    depth = weights.values.shape[1]
    groups = np.arange(depth) * len(weights.scale) // depth
    if weights.values.dtype == jnp.float8_e4m3fn:
        return (
            np.asarray(weights.values, np.float64)
            * np.asarray(weights.scale, np.float64).T[:, groups]
        )
    steps = np.asarray(input_order(weights.values), np.float64)
    if weights.zero is not None:
        steps = steps - np.asarray(weights.zero, np.float64).T[:, groups]
    return steps * np.asarray(weights.scale, np.float64).T[:, groups]


def assert_exact(found: Any, case: Case) -> None:
    total, partials = (np.asarray(array, np.float64) for array in found)
    assert_near((total, partials.sum(0)), exact(case), FLOAT8_ERROR if case.float8 else ERROR)


def assert_near(found: Any, expected: Any, error: float = ERROR) -> None:
    for result, wanted in zip(found, expected, strict=True):
        assert result.shape == wanted.shape
        assert np.linalg.norm(np.float64(result) - wanted) <= error * np.linalg.norm(wanted)


@pytest.mark.parametrize("case", [SMALL, SMALL8, GROUPS8], ids=str)
def test_the_reference_is_the_layer(case: Case):
    function = functools.partial(o_gate_up_down, eps=EPS)
    # Else XLA leaves out what rounds between two products.
    options = FAST_COMPILE | {"xla_allow_excess_precision": False}
    assert_exact(jax.jit(function, compiler_options=options)(*arguments_of(case)), case)


# One thread block has all phases in one launch.
@pytest.mark.slow  # what the phases are made of is tested below
@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (SMALL, Tuning(warpgroups=2, stages=2, blocks=1)),
        (dataclasses.replace(SMALL, zeros=True), Tuning(warpgroups=3, stages=1, blocks=1)),
        (TEST_CASES[0], Tuning(warpgroups=3, stages=2, blocks=6)),
        (TEST_CASES[1], Tuning(warpgroups=3, stages=1, blocks=5)),
        (TEST_CASES[2], Tuning(warpgroups=4, stages=2, blocks=7)),
        (SMALL8, Tuning(warpgroups=2, stages=2, blocks=1)),
        (GROUPS8, Tuning(warpgroups=2, stages=2, blocks=1)),
        (TEST_CASES[5], Tuning(warpgroups=4, stages=2, blocks=5)),
        (TEST_CASES[3], Tuning(warpgroups=4, stages=2, blocks=5)),
    ],
    ids=str,
)
def test_interpreted_its_phases_give_the_layer(case: Case, tuning: Tuning):
    kernel = functools.partial(o_gate_up_down_mosaic, eps=EPS, tuning=tuning)
    meeting = jnp.zeros(meeting_shape().shape, jnp.int32)
    assert_exact(interpreted(kernel, *arguments_of(case), meeting, detect_races=True), case)


@pytest.mark.parametrize("case", [*TEST_CASES[:2], TEST_CASES[3], TEST_CASES[5]], ids=str)
def test_it_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: make_arguments(case))
    meeting = meeting_shape()
    function = functools.partial(o_gate_up_down_mosaic, eps=EPS)
    lowered(function, *arguments, meeting)


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [None, Tuning(2, 3), Tuning(3, 1, blocks=96)], ids=str)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_on_the_device_it_is_the_layer(case: Case, tuning: Tuning | None):
    function = jax.jit(functools.partial(o_gate_up_down_mosaic, eps=EPS, tuning=tuning))
    arguments, meeting = arguments_of(case), jnp.zeros(meeting_shape().shape, jnp.int32)
    first = function(*arguments, meeting)
    assert_exact(first, case)
    for _ in range(50):
        again = function(*arguments, meeting)
        assert all(map(jnp.array_equal, first, again)), "a race"
    assert not meeting.any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [TEST_CASES[2], TEST_CASES[4]], ids=str)
def test_on_the_device_a_row_is_the_same_whatever_stands_beside_it(case: Case):
    x, residual, weights = arguments_of(case)
    function = jax.jit(functools.partial(o_gate_up_down_mosaic, eps=EPS))
    total, partials = function(
        x, residual, weights, meeting := jnp.zeros(meeting_shape().shape, jnp.int32)
    )
    for rows in (1, 2, 7):
        some, parts = function(x[:rows], residual[:rows], weights, meeting)
        assert jnp.array_equal(some, total[:rows])
        assert jnp.array_equal(parts, partials[:, :rows])


def test_a_warp_multiplies_its_group_of_inputs():
    """The arithmetic of the lanes of each warp, on numbers, with the fragments of PTX's manual.

    A lane l of mma.m16n8k16 holds of the first operand rows l / 4 and l / 4 + 8, of the second one
    column l / 4; of each of them entries 2 (l mod 4) and the next, and both again 8 further.
    """
    draw, masks = np.random.default_rng(0).integers, [HALVES, HALVES << 4]
    weights, rows, begin = draw(-8, 8, (TILES, TILE, BLOCK)), draw(-8, 8, (ROWS, 1024)), 512
    stored = np.asarray(kernel_order(jnp.asarray(weights, jnp.int8)), np.uint8) & 15
    values = in_shared_memory(
        (stored[..., ::2] | stored[..., 1::2] << 4).reshape(TILES, TILE, 2, 128)
    )
    x = in_shared_memory(rows.astype(jnp.bfloat16).view(np.uint8).reshape(1, ROWS, -1, 128))
    for warp in range(WARPS):
        columns = [loaded(x, row_chunk(LANES, begin // 8, warp, at)) for at in range(GROUP // SPAN)]
        own = slice(GROUP * warp, GROUP * (warp + 1))
        for tile in range(TILES):
            total = np.zeros((TILE, ROWS))
            for span in range(GROUP // SPAN):
                words = loaded(values, weight_chunk(LANES, warp, tile, span // 2))
                halves = words[2 * (span % 2) :][:2]
                wide = [
                    [
                        numbers(pair) * factor / STEP - 8
                        for pair, factor in scaled_pairs(half, masks)
                    ]
                    for half in halves
                ]
                for half in range(2):
                    second = [numbers(word) for word in columns[span][2 * half :][:2]]
                    total += product(first_operand(wide, half), second)
            expected = weights[tile, :, own] @ rows[:, begin:][:, own].T
            assert np.array_equal(total, expected)


def test_weights_are_widened_exactly_to_bfloat16():
    """Whatever the weight and its zero: all steps have few enough bits for bfloat16."""
    values, zeros = np.arange(-8, 8), np.arange(-8, 32)
    words = np.sum([(values.astype(np.int64) & 15) << 4 * place for place in range(8)], 0)
    for pair, factor in scaled_pairs(words, [HALVES, HALVES << 4]):
        assert np.float64(jnp.bfloat16(factor)) == factor
        for entry in numbers(pair).T:
            addends = -STEP * (8.0 + zeros)
            found = entry * factor + addends[:, None]
            assert np.array_equal(found, STEP * (values - zeros[:, None]))
            for exact_in_bfloat16 in (addends, found):
                assert np.array_equal(rounded(exact_in_bfloat16), exact_in_bfloat16)


def test_a_warp_multiplies_its_group_of_8_bit_floats():
    """As above, with the fragments of mma.m16n8k32: four entries side by side, and those 16 further
    on."""
    draw = np.random.default_rng(0).integers
    weights, rows, begin = draw(-8, 8, (TILES, TILE, BLOCK)), draw(-8, 8, (ROWS, 1024)), 512

    def stored(values: np.ndarray) -> np.ndarray:
        lines = values.astype(jnp.float8_e4m3fn).view(np.uint8)
        return in_shared_memory(
            lines.reshape(-1, *values.shape[-2:-1], values.shape[-1] // 128, 128)
        )

    values, x = stored(weights), stored(rows)
    for warp in range(WARPS):
        loads = [
            loaded(x, float8_products.row_chunk(LANES, begin // 16, warp, pair))
            for pair in range(2)
        ]
        columns = [words for load in loads for words in (load[:2], load[2:])]
        inputs = slice(GROUP * warp, GROUP * (warp + 1))
        for tile in range(TILES):
            total = np.zeros((TILE, ROWS))
            for step, second in enumerate(columns):
                first = loaded(values, float8_products.weight_chunk(LANES, warp, tile, step))
                operands = ([float8_numbers(word) for word in part] for part in (first, second))
                total += product(*operands)
            expected = weights[tile, :, inputs] @ rows[:, begin:][:, inputs].T
            assert np.array_equal(total, expected)


def float8_numbers(words: np.ndarray) -> np.ndarray:
    """Four numbers of each word: [lanes, 4]."""
    return words.astype("<u4").view(jnp.float8_e4m3fn).reshape(-1, 4).astype(np.float64)


def test_an_entry_of_a_row_is_where_lanes_look_for_it():
    places = [entry_chunk(lane % 8, 64 + lane // 8) for lane in range(32)]
    assert places == row_chunk(LANES, 64, 0, 0).tolist()


@pytest.mark.parametrize(("units", "blocks"), [(14336, 132), (12288, 132), (4608, 5), (9216, 96)])
def test_thread_blocks_have_each_job_once(units: int, blocks: int):
    num_splits = splits_of(units)
    assert num_splits is not None
    tuning = Tuning(warpgroups=3, stages=2, blocks=blocks)
    sizes = 2, 512, 1024, units, num_splits, EPS
    plan = Plan(*sizes, tuning, form=None, names=PHASES, interpret=False)

    def of_blocks(function: Any) -> Any:
        name = kernel_axes.name("block")
        over = jax.vmap(lambda _: function(), axis_name=name, axis_size=blocks)
        return jax.tree.map(np.asarray, jax.jit(over)(jnp.arange(blocks)))

    jobs_before, blocks_before = np.zeros(blocks), np.zeros(blocks)
    for at, phase in enumerate(plan.phases):
        first, count = of_blocks(lambda phase=phase: plan.own_jobs(phase))
        split = of_blocks(lambda phase=phase: plan.split(phase))
        for part in range(phase.splits):
            jobs = [
                range(f, f + n) for f, n, s in zip(first, count, split, strict=True) if s == part
            ]
            assert sorted(job for own in jobs for job in own) == list(range(phase.jobs))
        assert (of_blocks(lambda at=at: plan.jobs_before(at)) == jobs_before).all()
        assert (of_blocks(lambda at=at: plan.blocks_before(at)) == blocks_before).all()
        jobs_before += count
        blocks_before += count * phase.blocks


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (dataclasses.replace(SMALL, rows=9), "9 rows: at most 8"),
        (Case(2, 640, 1024, 512), "640 inputs: a multiple of 512 up to 4096"),
        (Case(2, 512, 5120, 512), "a residual stream of 5120: a multiple of 1024 up to 4096"),
        (Case(2, 512, 1024, 640), "640 units: a multiple of 512 in few parts"),
    ],
)
def test_it_says_what_it_cannot_take(case: Case, message: str):
    problem = misfit(*jax.eval_shape(lambda: make_arguments(case)))
    assert problem is not None and message in problem
