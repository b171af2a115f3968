"""Experts in one launch: what the threads of its warpgroups compute, on numbers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import warp_products, words
from pallas_kernels.expert_gate_up_down import choice, filled, outputs, products, router
from pallas_kernels.expert_gate_up_down.cases import Case, make_arguments
from pallas_kernels.expert_gate_up_down.plan import (
    OUTPUTS,
    ROWS,
    TILE,
    UNITS,
    WARPGROUPS,
    WARPS,
    RouterPlan,
)
from pallas_kernels.expert_slots import make_slots
from pallas_kernels.top_k.routes import RouteRule, SharedGate, expert_routes_reference
from tests.helpers.expert_products import assert_exact
from tests.helpers.warp_products import in_shared_memory
from tests.helpers.warpgroups import BF16, SHARED, Ref, Warpgroup, emulated, number, shared

MODULES = choice, filled, outputs, products, router, warp_products, words
BLOCKS = 20  # thread blocks of a router's product
PARTS, LISTS = 1 << 16, 1 << 17  # where these begin in shared memory
RULES = [
    RouteRule(8, normalize=True, has_shared=True),
    RouteRule(4, "chosen"),
    RouteRule(3, "sigmoid", normalize=True, scale=2.5, has_shared=True),
    RouteRule(2, has_shared=True),
]


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("rule", RULES, ids=str)
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
    count = shared(LISTS + 4096, (1,), np.int32)
    num_experts = experts + rule.has_shared
    filled._emit(None, lists[1], lists[2], lists[3], count, num_experts=num_experts)

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
    [listed] = np.nonzero(of_slots < num_experts)
    assert count.array == len(listed)
    assert np.array_equal(lists[2].array[: len(listed)], listed)
    assert np.array_equal(lists[3].array[: len(listed)], of_slots[listed])


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


def test_warps_multiply_and_outputs_are_stored(monkeypatch: pytest.MonkeyPatch):
    """All jobs of an expert of three rows, in the layouts of memory."""
    case = Case(3, 1, 2, 512, 128)
    x, _, _, *experts = make_arguments(case)
    expert = 1
    gate_up, down = (weights for weights in experts)
    rows = np.zeros((ROWS, case.hidden), BF16)
    rows[: case.rows] = np.asarray(x)
    units = np.zeros((case.units // products.SPAN, ROWS, products.SPAN), BF16)
    found = np.full((ROWS, case.hidden), np.nan, np.float32)
    SHARED[: rows.nbytes] = in_shared_memory(rows.view(np.uint8).reshape(1, ROWS, -1, 128))

    def run(name: Any, blocks: Any, x: Ref, scale: Any, places: Any, span: int, part: int) -> None:
        """A job: the blocks of all warpgroups [WARPGROUPS, TILE, 128]."""
        for index in range(WARPGROUPS):
            emulated(monkeypatch, MODULES, Warpgroup(index))
            stored = in_shared_memory(blocks[index].reshape(2, TILE // 2, -1, 128))
            values = shared(1 << 15, (2, 1, 1, 8, 128), np.uint8)
            SHARED[1 << 15 :][: stored.size] = stored
            inputs = 128 * index if name == "gate_up" else 0
            first = number(inputs // products.SPAN + span)
            sums = products._emit_sums(None, values, x, first, name=name)
            how = {"inputs": part, "sharing": 128}
            first, second = map(number, places)
            place = Ref(scale.reshape(-1)), first, second, number(inputs)
            scales = products._emit_scales(None, *place, **how)
            by_warp = parts.array[index].reshape(WARPS, 2, 8, 4, 2)  # warps' halves, lanes, rows
            for half in range(2):
                values_of_half = sums[half] * scales[half]
                by_warp[:, half] = values_of_half.reshape(WARPS, 8, 4, 2)

    parts = shared(PARTS, (WARPGROUPS, *products.SUMS), np.float32)
    values, scale = np.asarray(gate_up.values)[expert], np.asarray(gate_up.scale)
    for job in range(case.units // UNITS):
        block = values[:, job * UNITS :][:, :UNITS].reshape(TILE, WARPGROUPS, 128).swapaxes(0, 1)
        columns = case.hidden // 128
        places = [(expert * 2 + half) * columns for half in range(2)]
        source = Ref(rows, 0)
        run("gate_up", np.ascontiguousarray(block), source, scale, places, 0, 32)
        outputs._emit_units(None, parts, Ref(units), number(job * UNITS), rows=case.rows)
    values, scale = np.asarray(down.values)[expert, 0], np.asarray(down.scale)
    for job in range(case.hidden // OUTPUTS):
        block = values[job * OUTPUTS :][:OUTPUTS].reshape(WARPGROUPS, TILE, 128)
        place = expert * (case.hidden // 128) + job * OUTPUTS // 128
        run("down", block, Ref(units), scale, [place] * 2, 0, 32)
        where = number(0), number(job * OUTPUTS)
        outputs._emit_products(None, parts, Ref(found), *where, rows=case.rows)
    assert np.isnan(found[case.rows :]).all()

    every = jnp.arange(case.num_experts)
    wide = np.moveaxis(np.asarray(gate_up.of(every)), -1, 1), np.asarray(down.of(every))[:, 0]
    chosen = np.full((case.rows, 1), expert)
    given = np.asarray(x), chosen, wide[0], np.swapaxes(wide[1], 1, 2)
    assert_exact(jnp.asarray(found[: case.rows, None]), case, given)
