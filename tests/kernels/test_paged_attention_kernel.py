"""The Hopper kernel of paged attention: interpreted, lowered, and (with `-m gpu`) run.

Slots that no query sees hold NaN, or infinity, and change nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.parallel import make_mesh
from pallas_kernels.paged_attention import misfit, paged_attention
from pallas_kernels.paged_attention.cases import (
    KERNEL_CASES,
    LONG_CASES,
    TEST_CASES,
    Case,
    make_arguments,
    poisoned,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.paged_attention.tuning import AttentionTuning
from tests.helpers.kernels import attention_error, fitting, interpreted, lowered
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

NARROW = AttentionTuning(block=64, stages=2)
TWO_HEADS = dataclasses.replace(NARROW, heads=2)
WIDE = AttentionTuning(block=128, stages=2, warpgroups=2, registers=240)
PING_PONG = dataclasses.replace(WIDE, ping_pong=True)
CONFIGS = {
    "tuned": None,
    "narrow": NARROW,
    "long blocks": AttentionTuning(block=128, stages=2),
    "two heads": TWO_HEADS,
    "two heads and splits": dataclasses.replace(TWO_HEADS, splits=2),
    "ping-pong": PING_PONG,
    "no ping-pong": WIDE,
    "two splits": dataclasses.replace(NARROW, splits=2),
    "eight splits": AttentionTuning(block=64, stages=5, splits=8),
    "eight splits of two warpgroups": dataclasses.replace(WIDE, splits=8),
    "ping-pong and splits": AttentionTuning(
        block=64, stages=2, warpgroups=2, splits=4, ping_pong=True
    ),
    "parts": AttentionTuning(block=128, stages=2, parts=3),
    "ping-pong and parts": dataclasses.replace(PING_PONG, parts=2),
}
# Contexts that end inside a block and a page, and at their ends; left edges in the last block too.
EDGES = (
    (Case("one query", (70, 127), 1, 4, 1, 128, 64), NARROW),
    (Case("padded tree", (70, 0), 6, 4, 1, 128, 16, tree=True, real_tokens=4), NARROW),
    (Case("padded chunk", (10, 120), 24, 4, 1, 64, 16, real_tokens=5), PING_PONG),
    (Case("window", (200, 9), 2, 4, 1, 128, 16, window=20), NARROW),
    (Case("window under a tree", (330,), 40, 4, 1, 64, 64, tree=True, window=200), PING_PONG),
    (Case("first slot, two heads", (3, 200), 2, 4, 2, 128, 16, first_slot=1), TWO_HEADS),
    (Case("first slot in the third block", (150, 20), 3, 4, 1, 128, 64, first_slot=140), NARROW),
)
INTERPRETED = (
    *((case, PING_PONG if case.num_tokens > 16 else NARROW) for case in KERNEL_CASES),
    *EDGES,
    (KERNEL_CASES[2], TWO_HEADS),
    (KERNEL_CASES[4], TWO_HEADS),
    (KERNEL_CASES[4], CONFIGS["long blocks"]),
    (Case("parts", (300, 0, 70), 3, 4, 2, 64, 64, tree=True), CONFIGS["parts"]),
    (
        Case("parts of a tree", (300, 9), 40, 4, 1, 64, 64, tree=True),
        CONFIGS["ping-pong and parts"],
    ),
    (Case("parts of a window", (600,), 3, 4, 1, 64, 16, window=90), CONFIGS["parts"]),
)
# The others take up to twenty seconds each, and run on every GPU that the tests meet.
FAST = {"K: window under a tree", "first slot, two heads", "parts"}
FAST_TO_LOWER = {"two splits"}
# Left edges with more blocks than the ring holds, and with fewer.
LEFT_EDGES = tuple(
    dataclasses.replace(case, name=f"{case.name}, {context}", context_lens=(context, 40))
    for context in (100, 700)
    for case in (
        Case("left edge of one query", (), 1, 8, 2, 128, 64, first_slot=5),
        Case("left edge of a tree", (), 6, 8, 2, 128, 16, tree=True, window=150),
        Case("two left edges", (), 70, 8, 2, 128, 64, window=90, first_slot=3, real_tokens=50),
    )
)


def named(name: str) -> Case:
    return next(case for case in KERNEL_CASES if case.name == name)


def assert_is_the_reference(case: Case, config: AttentionTuning) -> jax.Array:
    """The interpreted kernel's result, where slots that no query sees hold NaN or infinity."""
    arguments = make_arguments(case, jnp.bfloat16)
    spoiled = poisoned(case, arguments, np.inf if case.real_tokens else np.nan)
    found = interpreted(paged_attention_mosaic, *spoiled, options=case.options, config=config)
    assert attention_error(case, found, arguments) < 4e-3
    return found


@pytest.mark.parametrize(
    ("case", "config"),
    [pytest.param(*one, marks=() if one[0].name in FAST else pytest.mark.slow)
     for one in INTERPRETED],
    ids=lambda one: getattr(one, "name", ""),
)  # fmt: skip
def test_interpreted_it_is_the_reference(case: Case, config: AttentionTuning):
    assert_is_the_reference(case, config)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 12, 100])
def test_interpreted_a_block_is_seen_whole(window: int | None):
    """Its slots count as context, past its queries' positions, as where block heads draft."""
    case = Case("block", (70, 3, 127), 8, 8, 2, 128, 16, window=window)
    q, pages, context = make_arguments(case, jnp.bfloat16)
    whole = q, pages, context._replace(context_lens=context.ends)
    found = interpreted(paged_attention_mosaic, *whole, options=case.options, config=NARROW)
    assert attention_error(case, found, whole) < 4e-3
    causal = interpreted(
        paged_attention_mosaic, q, pages, context, options=case.options, config=NARROW
    )
    assert attention_error(case, causal, whole) > 4e-3, "the last queries see nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("config", [WIDE, AttentionTuning(block=64, stages=2, warpgroups=2)])
def test_ping_pong_scheduling_changes_nothing(config: AttentionTuning):
    case = named("K: window")
    alternating = assert_is_the_reference(case, dataclasses.replace(config, ping_pong=True))
    assert jnp.array_equal(alternating, assert_is_the_reference(case, config))


@pytest.mark.parametrize(
    "name", [name if name in FAST_TO_LOWER else slow(name) for name in CONFIGS]
)
@first_is_fast(KERNEL_CASES[::-1], 5)  # the last ones: windows, first slots, chunks
def test_it_lowers_for_cuda(case: Case, name: str):
    case = fitting(case, CONFIGS[name])
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    how = {"options": case.options, "config": CONFIGS[name]}
    lowered(functools.partial(paged_attention_mosaic, **how), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in (*KERNEL_CASES, *LONG_CASES, *LEFT_EDGES) for name in CONFIGS],
    ids=str,
)
def test_on_the_device_it_is_the_reference(case: Case, name: str):
    case = fitting(case, CONFIGS[name])
    arguments = make_arguments(case, jnp.bfloat16)
    function = functools.partial(paged_attention_mosaic, options=case.options, config=CONFIGS[name])
    found = function(*arguments)
    assert attention_error(case, found, arguments) < 4e-3
    assert all(jnp.array_equal(found, function(*arguments)) for _ in range(5)), "a race"
    for poison in (np.nan, np.inf):
        spoiled = poisoned(case, arguments, poison)
        for _ in range(3):
            np.testing.assert_array_equal(function(*spoiled), found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_devices_attend_with_their_own_heads(case: Case):
    """As under tensor parallelism: a mesh of two devices, each with half of the heads."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    if case.kv_heads % 2:
        case = dataclasses.replace(case, kv_heads=2, num_heads=2 * case.num_heads)
    arguments = make_arguments(case, jnp.bfloat16)
    heads, pages, whole = P(None, None, "model"), P(None, "model"), P()
    sharded = jax.shard_map(
        functools.partial(paged_attention_mosaic, options=case.options),
        mesh=make_mesh(2),
        in_specs=(heads, pages, whole),
        out_specs=heads,
        check_vma=False,
    )
    assert attention_error(case, jax.jit(sharded)(*arguments), arguments) < 4e-3


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (TEST_CASES[0], jnp.bfloat16, "heads of 16"),
        (KERNEL_CASES[0], jnp.float32, "all must be bfloat16"),
        (Case("", (9,), 1, 2, 1, 64, 5), jnp.bfloat16, "pages of 5 slots"),
        (Case("", (9,), 1, 2, 2, 64, 16), jnp.bfloat16, "1 query heads of 64"),
    ],
    ids=["head", "dtype", "page", "group"],
)
def test_unsupported_arguments_are_named(case: Case, dtype: Any, message: str):
    q, pages, _ = arguments = make_arguments(case, dtype)
    assert message in str(misfit(q, pages.k, pages.v, order_invariant=False))
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        paged_attention(*arguments, implementation="mosaic_gpu")
    auto = functools.partial(paged_attention, implementation="auto")
    found = jax.jit(auto, compiler_options=FAST_COMPILE)(*arguments)
    assert np.isfinite(np.asarray(found)).all(), "the reference takes it"
