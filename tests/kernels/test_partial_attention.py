"""The Hopper kernel of attention to parts of pages: interpreted, lowered, and (with `-m gpu`) run.

tests/parallel/test_sequence_parallel.py has the tests of its reference.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import (
    KERNEL_CASES,
    LONG_CASES,
    PARTIAL_BENCHMARK_CASES,
    TEST_CASES,
    Case,
    make_arguments,
    normalized,
    parts_of,
    poisoned,
)
from pallas_kernels.paged_attention.mosaic_gpu import partial_attention_mosaic
from pallas_kernels.paged_attention.partial import partial_attention
from pallas_kernels.paged_attention.parts import (
    PartialAttention,
    merge_partials,
    partial_attention_reference,
)
from pallas_kernels.paged_attention.tuning import AttentionTuning
from tests.helpers.kernels import (
    attention_error,
    fitting,
    interpreted,
    lowered,
    relative_error,
    widened,
)
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

run_part = jax.jit(
    partial_attention_reference,
    static_argnames=("page_size", "options"),
    compiler_options=FAST_COMPILE,
)
NARROW = AttentionTuning(block=64, stages=2)
WIDE = AttentionTuning(block=128, stages=2, warpgroups=2, registers=240)
CONFIGS = {
    "tuned": None,
    "narrow": NARROW,
    "two heads": dataclasses.replace(NARROW, heads=2),
    "ping-pong": dataclasses.replace(WIDE, ping_pong=True),
    "two splits": dataclasses.replace(WIDE, splits=2, registers=None, block=64),
    "eight splits": AttentionTuning(block=64, stages=5, splits=8),
    "eight splits of long blocks": AttentionTuning(block=128, stages=2, splits=8),
    "parts": AttentionTuning(block=128, stages=2, parts=3),
}
FAST_TO_LOWER = {"tuned", "two splits"}
# The second of two devices has no slot of the first sequence, nor of the second one's tree.
INTERPRETED = (
    (Case("a tree", (3, 46), 2, 4, 1, 128, 16, tree=True), NARROW),
    (Case("a chunk", (3, 150), 24, 4, 1, 64, 32), CONFIGS["ping-pong"]),
    (Case("a window", (200, 9), 3, 8, 2, 128, 16, window=20), CONFIGS["two heads"]),
    (Case("a window under a tree", (330,), 40, 4, 1, 64, 64, tree=True, window=200), WIDE),
    (Case("first slot", (150, 20), 3, 4, 1, 128, 64, first_slot=140), NARROW),
    (Case("a padded tree", (70, 0), 6, 4, 1, 128, 16, tree=True, real_tokens=4), NARROW),
    (Case("parts", (600, 3), 3, 4, 1, 64, 16, tree=True), CONFIGS["parts"]),
)


def test_parts_of_long_contexts_are_merged():
    """The tuning reads them in parts: no part of the output is left for the caller to merge."""
    case = Case("long", (65_536,), 6, 32, 8, 128, 128, tree=True)
    shapes = jax.eval_shape(lambda: parts_of(make_arguments(case, jnp.bfloat16), 2)[0])
    attend = functools.partial(partial_attention_mosaic, page_size=128, options=case.options)
    found = jax.eval_shape(attend, *shapes)
    assert found.weighted.shape == (1, 6, 32, 128)
    assert found.peak.shape == found.total.shape == (1, 6, 32)


def check(case: Case, devices: int, attend: Callable[..., PartialAttention]) -> None:
    """Each device's part is the reference's in float32, and merged they are whole attention.

    Slots that no query sees hold NaN. ``attend`` takes the arguments and options of
    partial_attention.
    """
    arguments = make_arguments(case, jnp.bfloat16)
    options = {"options": case.options, "page_size": case.page_size}
    found = [
        attend(*part, **options) for part in parts_of(poisoned(case, arguments, np.nan), devices)
    ]
    wide: Any = jax.tree.map(widened, arguments)
    with jax.default_matmul_precision("highest"):
        expected = [run_part(*part, **options) for part in parts_of(wide, devices)]
    for one, wanted in zip(found, expected, strict=True):
        check_part(one, wanted)
    assert attention_error(case, merged(found), arguments) < 4e-3


def merged(parts: Sequence[PartialAttention]) -> jax.Array:
    return merge_partials(PartialAttention(*map(jnp.stack, zip(*parts, strict=True))))


def check_part(found: PartialAttention, expected: PartialAttention) -> None:
    """Both are equal where a query sees a slot. Where it sees none, the part has no weight."""
    sees = np.asarray(expected.peak) > -1e29
    (out, log_sums), (wanted, wanted_sums) = (
        map(np.asarray, normalized(part)) for part in (found, expected)
    )
    assert out.dtype == log_sums.dtype == np.float32
    assert np.isfinite(out).all()
    assert (log_sums[~sees] < -1e19).all()
    if sees.any():
        np.testing.assert_allclose(log_sums[sees], wanted_sums[sees], atol=1e-3)
        assert error(out[sees], wanted[sees]) < 4e-3


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(*one, id=one[0].name, marks=pytest.mark.slow if index else ())
        for index, one in enumerate(INTERPRETED)
    ],
)
def test_interpreted_parts_are_those_of_the_reference(case: Case, config: AttentionTuning):
    check(case, 2, functools.partial(interpreted, partial_attention_mosaic, config=config))


@pytest.mark.parametrize(
    "name", [name if name in FAST_TO_LOWER else slow(name) for name in CONFIGS]
)
@first_is_fast([*(INTERPRETED[i][0] for i in (3, 0, 1, 2)), *PARTIAL_BENCHMARK_CASES])
def test_it_lowers_for_cuda(case: Case, name: str):
    case, config = fitting(case, CONFIGS[name]), CONFIGS[name]
    shapes = jax.eval_shape(lambda: parts_of(make_arguments(case, jnp.bfloat16), 2)[1])
    how = {"options": case.options, "page_size": case.page_size, "config": config}
    lowered(functools.partial(partial_attention_mosaic, **how), *shapes)


@pytest.mark.parametrize(
    ("case", "dtype", "devices", "implementation", "message"),
    [
        (TEST_CASES[0], jnp.bfloat16, 2, "mosaic_gpu", "heads of 16"),
        (KERNEL_CASES[0], jnp.float32, 2, "mosaic_gpu", "all must be bfloat16"),
        (KERNEL_CASES[4], jnp.bfloat16, 4, "mosaic_gpu", "pages of 4 slots"),
        (KERNEL_CASES[0], jnp.bfloat16, 2, "mosaic_tpu", "parts of pages"),
    ],
    ids=["head", "dtype", "page", "tpu"],
)
def test_unsupported_arguments_are_named(case, dtype, devices, implementation, message: str):
    arguments = parts_of(make_arguments(case, dtype), devices)[0]
    run = functools.partial(partial_attention, page_size=case.page_size)
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        run(*arguments, implementation=implementation)
    automatic = implementation.replace("mosaic_gpu", "auto").replace("mosaic_tpu", "auto_tpu")
    found = jax.eval_shape(functools.partial(run, implementation=automatic), *arguments)
    assert found.weighted.shape == arguments[0].shape, "the reference takes it"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "tuned") for case in (*KERNEL_CASES, *LONG_CASES)),
        *((case, name) for case, _ in INTERPRETED[:4] for name in CONFIGS),
        *((case, name) for case in LONG_CASES[1::2] for name in CONFIGS if "splits" in name),
    ],
    ids=str,
)
def test_on_the_device_parts_are_those_of_the_reference(case: Case, name: str):
    config = CONFIGS[name]
    case = fitting(case, config)

    def attend(*arguments: Any, **options: Any) -> PartialAttention:
        run = functools.partial(partial_attention_mosaic, **options, config=config)
        found = run(*arguments)
        for _ in range(5):
            again = run(*arguments)
            assert all(map(np.array_equal, found, again)), "a race"
        return found

    check(case, 2, attend)
    if case.page_size >= 64 and config is None:
        check(case, 8, attend)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
def test_on_the_device_the_kernel_and_jnp_agree_on_long_contexts(tree: bool):
    """As an engine calls it: 32k tokens of context, and a chunk of 1,024 tokens or a tree of 60."""
    case = Case("", (32768,), 60 if tree else 1024, 32, 8, 128, 128, tree=tree)
    arguments = make_arguments(case, jnp.bfloat16)
    run = functools.partial(partial_attention, page_size=case.page_size, options=case.options)
    by_kernel, by_reference = (
        merged([run(*part, implementation=how) for part in parts_of(arguments, 2)])
        for how in ("auto", "reference")
    )
    assert relative_error(by_kernel, by_reference) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
def test_each_of_two_devices_attends_to_its_part(tree: bool, number: int):
    """As test_devices_merge_their_parts, one device at a time and without a mesh."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    case = Case("", (70, 3), 40, 4, 1, 64, 32, tree=tree)
    part = parts_of(make_arguments(case, jnp.bfloat16), 2)[number]
    options = {"options": case.options, "page_size": case.page_size}
    wide: Any = jax.tree.map(widened, part)
    with jax.default_matmul_precision("highest"):
        expected = run_part(*wide, **options)
    placed = jax.device_put(part, jax.devices()[number])
    check_part(jax.device_get(partial_attention_mosaic(*placed, **options)), expected)
