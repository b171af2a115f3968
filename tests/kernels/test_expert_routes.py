"""Which experts rows go through: the reference, and the Hopper kernel interpreted, lowered, run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_slots import Slots
from pallas_kernels.top_k.mosaic_gpu import expert_routes_in_slots_mosaic, expert_routes_mosaic
from pallas_kernels.top_k.routes import (
    RouteRule,
    SharedGate,
    expert_routes,
    expert_routes_in_slots,
)
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import slow

HIDDEN = 512
RULES = [
    RouteRule(8, normalize=True, has_shared=True),
    RouteRule(4, "chosen"),
    RouteRule(3, "sigmoid", normalize=True, scale=2.5),
    RouteRule(2, has_shared=True),
]
each_rule = pytest.mark.parametrize("rule", [RULES[0], *map(slow, RULES[1:])], ids=str)


def make_arguments(rule: RouteRule, rows: int = 3, experts: int = 256, splits: int = 4) -> Any:
    """Partial sums with a row of padding, rows of which one is none, and a gate.

    They are halves of small integers: many logits are equal, and all sums are exact.
    """
    random = np.random.default_rng(rule.k)
    partials = random.integers(-9, 9, (splits, rows + 1, experts)).astype(np.float32) / 2
    is_row = np.arange(rows) != 1
    gate = None
    if rule.has_shared and rule.normalize:
        sizes = (rows, HIDDEN), (HIDDEN,)
        x, weight = (random.standard_normal(size) * HIDDEN**-0.25 for size in sizes)
        gate = SharedGate(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    return jnp.asarray(partials), jnp.asarray(is_row), gate


def assert_right(found: Any, rule: RouteRule, arguments: Any) -> None:
    """As written out in NumPy."""
    partials, is_row, gate = arguments
    logits = np.asarray(partials, np.float64).sum(0)[: len(is_row)]
    experts = np.argsort(-logits, axis=1, kind="stable")[:, : rule.k]
    chosen = np.take_along_axis(logits, experts, axis=1)
    scores = {
        "softmax": np.exp(chosen) / np.exp(logits).sum(1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-chosen)),
        "chosen": np.exp(chosen) / np.exp(chosen).sum(1, keepdims=True),
    }[rule.scores]
    weights = scores / scores.sum(1, keepdims=True) if rule.normalize else scores
    weights = weights * rule.scale
    if rule.has_shared:
        weight = np.ones(len(is_row))
        if gate is not None:
            x, gate = (np.asarray(array, np.float64) for array in gate)
            weight = 1 / (1 + np.exp(-x @ gate))
        weights = np.column_stack([weights, weight])
        experts = np.column_stack([experts, np.full(len(is_row), logits.shape[1])])
    none = logits.shape[1] + rule.has_shared
    np.testing.assert_array_equal(found[0], np.where(np.asarray(is_row)[:, None], experts, none))
    np.testing.assert_allclose(found[1], weights, rtol=2e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_they_are_written_out_in_numpy(rule: RouteRule):
    partials, is_row, gate = arguments = make_arguments(rule)
    assert_right(expert_routes(partials, is_row, rule, gate), rule, arguments)


@each_rule
def test_interpreted_they_are_written_out_in_numpy(rule: RouteRule):
    partials, is_row, gate = arguments = make_arguments(rule)
    rows = is_row.astype(jnp.int32)
    assert_right(
        interpreted(expert_routes_mosaic, partials, rows, rule=rule, gate=gate), rule, arguments
    )


def assert_slots_right(found: Any, rule: RouteRule, arguments: Any) -> None:
    """Each pair of a row and an expert is in the slot of the first pair of that expert."""
    assert_right(found[:2], rule, arguments)
    experts, none = np.asarray(found[0]), arguments[0].shape[-1] + rule.has_shared
    expert_of_slot, rows, places = found[2]
    assert rows is None
    flat, slots, seen = experts.reshape(-1), np.full(experts.size, none), {}
    wanted = np.full(experts.size, -1)
    for pair, expert in enumerate(flat):
        if expert == none:
            continue
        slot = seen.setdefault(expert, pair)
        slots[slot] = expert
        wanted[pair] = 8 * slot + pair // experts.shape[1]
    np.testing.assert_array_equal(expert_of_slot, slots)
    np.testing.assert_array_equal(places, wanted.reshape(experts.shape))


def in_slots(rule: RouteRule, how: Any, partials: Any, is_row: Any, gate: Any) -> Any:
    return expert_routes_in_slots(partials, is_row, rule, gate, how)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_slots_are_those_of_the_first_row_that_chose_an_expert(rows: int):
    arguments = make_arguments(RULES[0], rows)
    assert_slots_right(in_slots(RULES[0], "reference", *arguments), RULES[0], arguments)


def test_interpreted_slots_of_a_row_are_its_choices():
    """Of more rows clusters of thread blocks, which the interpreter does not know, find them."""
    partials, is_row, gate = arguments = make_arguments(RULES[0], 1)
    rows = is_row.astype(jnp.int32)
    experts, weights, *slots = interpreted(
        expert_routes_in_slots_mosaic, partials, rows, rule=RULES[0], gate=gate
    )
    assert_slots_right((experts, weights, Slots(slots[0], None, slots[1])), RULES[0], arguments)


def by_kernel(rule: RouteRule, partials: Any, is_row: Any, gate: Any) -> Any:
    return expert_routes(partials, is_row, rule, gate, "mosaic_gpu")


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_lowers_for_cuda(rule: RouteRule):
    arguments = jax.eval_shape(functools.partial(make_arguments, rule, 8, 256, 16))
    lowered(functools.partial(by_kernel, rule), *arguments)
    lowered(functools.partial(in_slots, rule, "mosaic_gpu"), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("rows", "experts", "splits"), [(1, 256, 16), (2, 256, 16), (8, 128, 2)])
def test_on_the_device_slots_are_written_out_in_numpy(
    rule: RouteRule, rows: int, experts: int, splits: int
):
    arguments = make_arguments(rule, rows, experts, splits)
    kernel = jax.jit(functools.partial(in_slots, rule, "mosaic_gpu"))
    first = kernel(*arguments)
    assert_slots_right(first, rule, arguments)
    for _ in range(20):
        again = kernel(*arguments)
        assert all(map(jnp.array_equal, jax.tree.leaves(first), jax.tree.leaves(again))), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("rows", "experts", "splits"), [(2, 256, 16), (40, 128, 1), (3, 1024, 2)])
def test_on_the_device_they_are_written_out_in_numpy(
    rule: RouteRule, rows: int, experts: int, splits: int
):
    arguments = make_arguments(rule, rows, experts, splits)
    kernel = jax.jit(functools.partial(by_kernel, rule))
    first = kernel(*arguments)
    assert_right(first, rule, arguments)
    for _ in range(20):
        assert all(map(jnp.array_equal, first, kernel(*arguments))), "a race"


@pytest.mark.parametrize(
    ("experts", "rule", "width", "message"),
    [
        (100, RouteRule(2), 256, "float32 logits of 100 experts"),
        (128, RouteRule(17), 256, "k = 17"),
        (128, RouteRule(2), 100, "a gate of 100 inputs"),
    ],
)
def test_unsupported_arguments_are_named(experts: int, rule: RouteRule, width: int, message: str):
    gate = SharedGate(*(jnp.zeros(size, jnp.bfloat16) for size in ((2, width), (width,))))
    with pytest.raises(ValueError, match=f"the kernel cannot take {message}"):
        expert_routes(jnp.zeros((1, 2, experts)), jnp.ones(2, bool), rule, gate, "mosaic_gpu")
