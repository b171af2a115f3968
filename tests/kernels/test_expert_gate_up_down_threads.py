"""Experts in one launch: what the threads of its warpgroups compute, on numbers."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import warp_products, words
from pallas_kernels.expert_gate_up_down import (
    choice,
    fetch_scales,
    filled,
    outputs,
    products,
    router,
    stored_of,
)
from pallas_kernels.expert_gate_up_down.cases import Case, make_arguments
from pallas_kernels.expert_gate_up_down.memory import viewed
from pallas_kernels.expert_gate_up_down.places import Place, first_input, scale_places
from pallas_kernels.expert_gate_up_down.plan import (
    OUTPUTS,
    ROWS,
    THREADS,
    TILE,
    UNITS,
    WARPGROUPS,
    WARPS,
    Kind,
    Phase,
    Plan,
    RouterPlan,
    Stored,
    Tuning,
)
from pallas_kernels.expert_gate_up_down.products import SPAN, SUMS
from pallas_kernels.expert_slots import make_slots
from pallas_kernels.packed_expert_product.widening import SUMS_OF_SCALED
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.top_k.routes import RouteRule, SharedGate, expert_routes_reference
from tests.helpers.expert_products import assert_exact
from tests.helpers.marks import slow
from tests.helpers.warp_products import in_shared_memory
from tests.helpers.warpgroups import BF16, SHARED, Ref, Warpgroup, emulated, number, shared

MODULES = choice, fetch_scales, filled, outputs, products, router, warp_products, words
STORED = Stored("e4m3", (128, 128))
BLOCKS = 20  # thread blocks of a router's product
BLOCK, PARTS, LISTS = 1 << 15, 1 << 16, 1 << 17  # where these begin in shared memory
RULES = [
    RouteRule(8, normalize=True, has_shared=True),
    RouteRule(4, "chosen"),
    RouteRule(3, "sigmoid", normalize=True, scale=2.5, has_shared=True),
    RouteRule(2, has_shared=True),
]


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("rule", [RULES[0], RULES[2], *map(slow, (RULES[1], RULES[3]))], ids=str)
def test_rows_choose_their_experts(rule: RouteRule, rows: int, monkeypatch: pytest.MonkeyPatch):
    """From a router's product to the list of the slots that have an expert."""
    rng, hidden, experts = np.random.default_rng(0), 512, 256
    x = rng.standard_normal((rows, hidden)).astype(BF16)
    weights = (rng.standard_normal((experts + 1, hidden)) * hidden**-0.5).astype(BF16)
    weights[7] = weights[200] = weights[3]  # of equal logits the lower index comes first
    is_row = np.arange(rows) != 1
    has_gate = rule.normalize and rule.has_shared
    plan = RouterPlan(rule, experts, experts + has_gate, hidden, BLOCKS)
    logits = np.zeros((rows, experts + 128), np.float32)
    parts = shared(PARTS, (WARPGROUPS * WARPS * TILE * ROWS,), np.float32)
    sources = Ref(x), Ref(weights[:experts]), Ref(weights[experts:])
    for block in range(BLOCKS):
        for index in range(WARPGROUPS):
            emulated(monkeypatch, MODULES, Warpgroup(index))
            router._emit_parts(None, *sources, parts, number(block), number(index), plan=plan)
        router._emit_logits(None, parts, Ref(logits), number(block), plan=plan)
    wanted = x.astype(np.float32) @ weights.astype(np.float32).T
    np.testing.assert_allclose(logits[:, : plan.logits], wanted[:, : plan.logits], atol=1e-5)

    pairs = rows * plan.count
    lists = [shared(LISTS + 512 * at, (pairs,), np.int32) for at in range(4)]
    found_weights, places = np.zeros(pairs, np.float32), np.zeros(pairs, np.int32)
    results = Ref(found_weights), Ref(places)
    arguments = Ref(logits), Ref(is_row.astype(np.int32)), *lists[:2]
    choice._emit(None, *arguments, *results, number(0), plan=plan)
    num_experts = experts + rule.has_shared

    gate = SharedGate(jnp.asarray(x), jnp.asarray(weights[experts])) if has_gate else None
    given = jnp.asarray(logits[None, :, :experts]), jnp.asarray(is_row)
    chosen, by_reference = expert_routes_reference(*given, rule, gate)
    slots = make_slots(chosen, num_experts)
    np.testing.assert_allclose(
        found_weights.reshape(rows, -1)[is_row], np.asarray(by_reference)[is_row], rtol=1e-5
    )
    wanted_places = np.where(is_row[:, None], slots.places, -1)
    assert np.array_equal(places.reshape(rows, -1), wanted_places)
    of_slots = np.asarray(slots.expert)
    assert np.array_equal(lists[1].array, of_slots)
    count = shared(LISTS + 4096, (1,), np.int32)
    for kind in Kind(STORED, 0, experts), Kind(STORED, experts, rule.has_shared, "shared"):
        filled._emit(None, lists[1], lists[2], lists[3], count, kind=kind)
        [listed] = np.nonzero((of_slots >= kind.first) & (of_slots < kind.first + kind.count))
        assert count.array == len(listed)
        assert np.array_equal(lists[2].array[: len(listed)], listed)
        assert np.array_equal(lists[3].array[: len(listed)], of_slots[listed] - kind.first)


def test_a_thread_block_that_is_not_the_first_writes_no_choices(monkeypatch: pytest.MonkeyPatch):
    rule = RULES[0]
    plan = RouterPlan(rule, 128, 129, 512, BLOCKS)
    results = np.full(9, 7.0, np.float32), np.full(9, 7, np.int32)
    lists = [shared(LISTS + 512 * at, (9,), np.int32) for at in range(2)]
    arguments = Ref(np.zeros((1, 256), np.float32)), Ref(np.ones(1, np.int32)), *lists
    emulated(monkeypatch, MODULES, Warpgroup())
    choice._emit(None, *arguments, *map(Ref, results), number(3), plan=plan)
    assert (results[0] == 7).all() and (results[1] == 7).all()
    assert np.array_equal(lists[1].array, [*range(8), 128])


@pytest.mark.parametrize(
    ("form", "hidden", "units"),
    [
        ("fp8", 512, 128),
        slow("fp8", 1024, 384),
        slow("mxfp8", 512, 128),
        ("mxfp4", 1024, 256),
    ],
)
def test_warps_multiply_and_outputs_are_stored(
    form: str, hidden: int, units: int, monkeypatch: pytest.MonkeyPatch
):
    """All jobs of an expert of three rows, in the layouts of memory."""
    case, expert = Case(3, 1, 2, hidden, units, form=form), 1
    x, _, _, gate_up, down = jax.jit(lambda: make_arguments(case))()
    stored = stored_of(gate_up)
    assert stored is not None
    plan = Plan(
        rows=3, slots=1, hidden=hidden, units=units, kinds=(Kind(stored, 0, 2),), tuning=Tuning()
    )
    rows = np.zeros((ROWS, hidden), BF16)
    rows[: case.rows] = np.asarray(x)
    SHARED[: rows.nbytes] = in_shared_memory(rows.view(np.uint8).reshape(1, ROWS, -1, 128))
    of_units = np.zeros((units // SPAN, ROWS, SPAN), BF16)
    found = np.full((ROWS, hidden), np.nan, np.float32)
    parts = shared(PARTS, (WARPGROUPS, *SUMS), np.float32)
    sources = Ref(rows, 0), Ref(of_units)
    for phase, weights, source in zip(plan.phases, (gate_up, down), sources, strict=True):
        arrays = {name: np.asarray(array) for name, array in viewed(phase, weights).items()}
        for job in range(phase.jobs):
            place = Place(*map(jnp.int32, (0, expert, job)))
            for index in range(WARPGROUPS):
                emulated(monkeypatch, MODULES, Warpgroup(index))
                total = sums_of_job(plan, phase, arrays, place, index, source)
                by_warp = parts.array[index].reshape(WARPS, 2, 8, 4, 2)  # halves, lanes, rows
                for half in range(2):
                    by_warp[:, half] = total[half].reshape(WARPS, 8, 4, 2)
            first = number(job * (UNITS if phase.name == "gate_up" else OUTPUTS))
            if phase.name == "gate_up":
                outputs._emit_units(None, parts, Ref(of_units), first, rows=case.rows)
            else:
                outputs._emit_products(None, parts, Ref(found), number(0), first, rows=case.rows)
    assert np.isnan(found[case.rows :]).all()

    every = jnp.arange(case.num_experts)
    wide = [np.asarray(jax.jit(PackedExperts.of)(each, every)) for each in (gate_up, down)]
    wide = np.moveaxis(wide[0], -1, 1), wide[1][:, 0]
    chosen = np.full((case.rows, 1), expert)
    given = np.asarray(x), chosen, wide[0], np.swapaxes(wide[1], 1, 2)
    assert_exact(jnp.asarray(found[: case.rows, None]), case, given)


@pytest.mark.parametrize(("name", "rows"), [("gate_up", 128), ("down", 16)])
def test_a_thread_reads_a_sector_of_a_jobs_scales(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
):
    """All rows of a job of Qwen3.6-35B-A3B, each with one or two sectors."""
    width, outputs = (512, UNITS) if name == "gate_up" else (2048, OUTPUTS)
    scale = np.random.default_rng(0).integers(0, 256, (3 * rows, width), np.uint8)
    nowhere = shared(LISTS, (THREADS,), np.int32)
    nowhere.array[:] = 0
    job, expert = 5, 2
    emulated(monkeypatch, MODULES, Warpgroup())
    first = number(expert * rows * width + job * outputs)
    sizes = {"rows": rows, "width": width, "outputs": outputs}
    fetch_scales._emit(None, Ref(scale), nowhere, first, **sizes)
    begins = range(job * outputs, (job + 1) * outputs, fetch_scales.SECTOR)
    expected = np.stack([scale[expert * rows :][:rows, begin : begin + 4] for begin in begins], 1)
    found = nowhere.array.view(np.uint8).reshape(-1, 4)
    assert np.array_equal(found[: expected.size // 4], expected.reshape(-1, 4))


def sums_of_job(
    plan: Plan, phase: Phase, arrays: dict[str, Any], place: Place, warpgroup: int, x: Ref
) -> list[np.ndarray]:
    """A warpgroup's sums of a job: of each thread's first output, and of its second."""
    values, scale = arrays[f"{phase.key}.values"], Ref(arrays[f"{phase.key}.scale"])
    expert, job, stored = int(place.expert), int(place.job), phase.stored
    places = scale_places(plan, phase, place, jnp.int32(warpgroup))
    inputs, total = phase.block // WARPS, [np.zeros((128, 2), np.float32)] * 2
    for step in range(phase.steps):
        start = int(first_input(phase, jnp.int32(step), warpgroup))
        columns = slice(start * stored.bits // 8, start * stored.bits // 8 + plan.row)
        if phase.name == "gate_up":
            block = values[2 * expert :, job * UNITS :, columns][:2, :UNITS]
        else:
            row = (expert * plan.hidden + job * OUTPUTS + warpgroup * TILE) // UNITS
            block = values[row : row + 2, :, columns]
        lines = in_shared_memory(np.ascontiguousarray(block).reshape(2, UNITS, -1, 128))
        SHARED[BLOCK : BLOCK + lines.size] = lines
        first, second = number(int(places.first)), number(int(places.second))
        how = {"stored": stored, "inputs": inputs, "by_column": places.by_column}
        halves = products._emit_scales(None, scale, first, second, number(start), **how)
        memory = shared(BLOCK, (2, 1, plan.row // 128, 8, 128), np.uint8)
        scales = SimpleNamespace(registers=SimpleNamespace(flat=halves))
        span = number(start // SPAN)
        sums = products._emit_sums(None, memory, x, span, scales, name=phase.name, stored=stored)
        factors = [SUMS_OF_SCALED] * 2 if stored.has_bytes else halves
        total = [t + each * by for t, each, by in zip(total, sums, factors, strict=True)]
    return total
