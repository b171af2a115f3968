"""The attention kernel with NaN or infinity in slots that no query sees."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.cases import (
    KERNEL_CASES,
    LONG_CASES,
    Case,
    make_arguments,
    poisoned,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tuning import AttentionTuning
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE

run_reference = jax.jit(
    functools.partial(paged_attention_reference, order_invariant=False),
    static_argnames="options",
    compiler_options=FAST_COMPILE,
)
NARROW = AttentionTuning(block=64, stages=2)
TWO_HEADS = AttentionTuning(block=64, stages=2, heads=2)
PING_PONG = AttentionTuning(block=128, stages=2, warpgroups=2, ping_pong=True, registers=240)
CONFIGS = {
    "tuned": None,
    "narrow": NARROW,
    "long blocks": AttentionTuning(block=128, stages=2),
    "two heads": TWO_HEADS,
    "ping-pong": PING_PONG,
    "no ping-pong": dataclasses.replace(PING_PONG, ping_pong=False),
    "two splits": dataclasses.replace(NARROW, splits=2),
    "eight splits": AttentionTuning(block=64, stages=5, splits=8),
    "ping-pong and splits": AttentionTuning(
        block=64, stages=2, warpgroups=2, splits=4, ping_pong=True
    ),
}
# Contexts that end inside a block and a page, and at their ends; left edges in the last block too.
INTERPRETED = (
    (Case("one query", (70, 127), 1, 4, 1, 128, 64), NARROW),
    (Case("padded tree", (70, 0), 6, 4, 1, 128, 16, tree=True, real_tokens=4), NARROW),
    (Case("padded chunk", (10, 120), 24, 4, 1, 64, 16, real_tokens=5), PING_PONG),
    (Case("window", (200, 9), 2, 4, 1, 128, 16, window=20), NARROW),
    (Case("window under a tree", (330,), 40, 4, 1, 64, 64, tree=True, window=200), PING_PONG),
    (Case("first slot, two heads", (3, 200), 2, 4, 2, 128, 16, first_slot=1), TWO_HEADS),
    (Case("first slot in the third block", (150, 20), 3, 4, 1, 128, 64, first_slot=140), NARROW),
)
FAST = {"first slot, two heads"}
FAST_TO_LOWER = {"tuned", "two splits"}
# Left edges with more blocks than the ring holds, and with fewer.
EDGES: tuple[tuple[int, int, dict[str, Any]], ...] = (  # query tokens, page size, options
    (1, 64, {"first_slot": 5}),
    (6, 16, {"tree": True, "window": 150}),
    (70, 64, {"window": 90, "first_slot": 3, "real_tokens": 50}),
)
LEFT_EDGES = tuple(
    Case(f"left edge, {context}, {tokens}", (context, 40), tokens, 8, 2, 128, page_size, **edge)
    for context in (100, 700)
    for tokens, page_size, edge in EDGES
)


# Cases for every configuration: of both widths of heads, sizes of pages and kinds of mask.
EVERYWHERE = [
    case
    for case in KERNEL_CASES
    if case.name in {"K: pages of 16, a tree", "K: causal chunk", "K: padded chunk"}
]


def run(case: Case, arguments: Any, config: AttentionTuning | None, interpret: Any) -> jax.Array:
    found = paged_attention_mosaic(
        *arguments, options=case.options, config=config, interpret=interpret
    )
    return jax.block_until_ready(found)  # the interpreter's callbacks run jax, too


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(*one, id=one[0].name, marks=() if one[0].name in FAST else pytest.mark.slow)
        for one in INTERPRETED
    ],
)
def test_interpreted_unseen_slots_do_not_change_the_output(case: Case, config: AttentionTuning):
    arguments = make_arguments(case, jnp.bfloat16)
    poison = np.inf if case.real_tokens else np.nan
    found = run(case, poisoned(case, arguments, poison), config, plgpu.InterpretGPUParams())
    expected = run_reference(*arguments, options=case.options)
    found, expected = (np.asarray(one).astype(np.float32) for one in (found, expected))
    sees = np.linalg.norm(expected, axis=(2, 3)) > 0
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[sees], expected[sees], atol=0.03)


@pytest.mark.parametrize(
    "name", [name if name in FAST_TO_LOWER else slow(name) for name in CONFIGS]
)
def test_its_configurations_lower_for_cuda(name: str):
    for case, _ in INTERPRETED[1:5:3]:
        if case.kv_heads % getattr(CONFIGS[name], "heads", 1):
            case = dataclasses.replace(case, kv_heads=2, num_heads=8)
        arguments = jax.eval_shape(lambda case=case: make_arguments(case, jnp.bfloat16))
        function = functools.partial(
            paged_attention_mosaic, options=case.options, config=CONFIGS[name]
        )
        assert jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "tuned") for case in (*KERNEL_CASES, *LONG_CASES, *LEFT_EDGES)),
        *((case, name) for case in (*EVERYWHERE, *LEFT_EDGES) for name in [*CONFIGS][1:]),
    ],
    ids=str,
)
def test_on_the_device_unseen_slots_do_not_change_the_output(case: Case, name: str):
    config = CONFIGS[name]
    if config is not None and case.kv_heads % config.heads:
        pytest.skip("an odd number of heads")
    arguments = make_arguments(case, jnp.bfloat16)
    expected = run(case, arguments, config, None)
    for poison in (np.nan, np.inf):
        spoiled = poisoned(case, arguments, poison)
        for _ in range(3):
            np.testing.assert_array_equal(run(case, spoiled, config, None), expected)
