"""The Hopper kernel of latent attention: interpreted, lowered, and (with `-m gpu`) run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.latent_attention import latent_attention, misfit
from pallas_kernels.latent_attention.cases import (
    BENCHMARK_CASES,
    KERNEL_CASES,
    LONG_CASES,
    LatentCase,
    make_arguments,
    poisoned,
)
from pallas_kernels.latent_attention.mosaic_gpu import latent_attention_mosaic
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.latent_attention.tuning import LatentTuning, latent_tuning
from pallas_kernels.pages import QueryContext
from tests.helpers.kernels import interpreted, lowered, relative_error, widened
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

# The others take up to twenty seconds each, and run on every GPU that the tests meet.
FAST = {"first slot"}
INTERPRETED = [
    pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
    for case in KERNEL_CASES
]


def error(case: LatentCase, found: jax.Array) -> float:
    """Relative, against the reference in float32; of queries that see a slot."""
    arguments: Any = jax.tree.map(widened, make_arguments(case, jnp.bfloat16))
    reference = functools.partial(latent_attention_reference, **case.options)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(reference, compiler_options=FAST_COMPILE)(*arguments)
    return relative_error(found, expected)


def assert_is_the_reference(case: LatentCase, splits: int) -> None:
    """The interpreted kernel, where slots that no query sees hold NaN."""
    arguments: Any = poisoned(case, np.nan)
    how = {**case.options, "config": LatentTuning(splits=splits)}
    assert error(case, interpreted(latent_attention_mosaic, *arguments, **how)) < 4e-3


@pytest.mark.parametrize("splits", [2, slow(1)])
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_it_is_the_reference(case: LatentCase, splits: int):
    assert_is_the_reference(case, splits)


@pytest.mark.slow
def test_interpreted_it_takes_the_sizes_of_published_models():
    case = LatentCase("", (70, 130), 2, 16, 1, 576, 64, tree=True)
    assert_is_the_reference(case, 1)


@pytest.mark.parametrize("splits", [None, slow(1), slow(2)])
@first_is_fast([*LONG_CASES, *KERNEL_CASES, *BENCHMARK_CASES[::5]], 2)
def test_it_lowers_for_cuda(case: LatentCase, splits: int | None):
    shapes: Any = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    config = None if splits is None else LatentTuning(splits=splits)
    lowered(functools.partial(latent_attention_mosaic, **case.options, config=config), *shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 2, 5])
@pytest.mark.parametrize("case", [*KERNEL_CASES, *LONG_CASES], ids=str)
def test_on_the_device_it_is_the_reference(case: LatentCase, splits: int | None):
    config = None if splits is None else LatentTuning(splits=splits)
    function = functools.partial(latent_attention_mosaic, **case.options, config=config)
    arguments: Any = make_arguments(case, jnp.bfloat16)
    found = function(*arguments)
    assert error(case, found) < 4e-3
    assert all(jnp.array_equal(found, function(*arguments)) for _ in range(5)), "a race"
    for poison in (np.nan, np.inf):
        spoiled: Any = poisoned(case, poison)
        np.testing.assert_array_equal(function(*spoiled), found)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (KERNEL_CASES[0], jnp.float32, "both must be bfloat16"),
        (LatentCase("", (9,), 1, 8, 1, 128, 16, latent=64), jnp.bfloat16, "latents of 64"),
        (LatentCase("", (9,), 1, 8, 1, 640, 16), jnp.bfloat16, "vectors of 640 entries"),
        (LatentCase("", (9,), 1, 8, 1, 576, 5), jnp.bfloat16, "pages of 5 slots"),
        (LatentCase("", (9,), 1, 12, 1, 576, 16), jnp.bfloat16, "12 heads"),
    ],
    ids=["dtype", "latent", "stored", "page", "heads"],
)
def test_unsupported_arguments_are_named(case: LatentCase, dtype: Any, message: str):
    arguments: Any = make_arguments(case, dtype)
    q, pages = arguments[:2]
    assert message in str(misfit(q, pages, case.latent, order_invariant=False))
    run = functools.partial(latent_attention, *arguments, **case.options)
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        run(implementation="mosaic_gpu")
    auto = jax.jit(functools.partial(run, implementation="auto"), compiler_options=FAST_COMPILE)()
    assert np.isfinite(np.asarray(auto)).all(), "the reference takes it"


def test_sums_that_do_not_depend_on_the_order_of_slots_are_left_to_the_reference():
    case = KERNEL_CASES[0]
    arguments: Any = make_arguments(case, jnp.bfloat16)
    with pytest.raises(ValueError, match="cannot take sums that do not depend"):
        latent_attention(
            *arguments, **case.options, order_invariant=True, implementation="mosaic_gpu"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": np.zeros((3, 1, 16, 100), np.float32)}, "do not fit pages"),
        ({"pages": np.zeros((3, 2, 16, 192), np.float32)}, "do not fit pages"),
        ({"context_lens": np.zeros(3, np.int32)}, "do not fit a batch of 2"),
        ({"ancestors": np.zeros((2, 3, 1), np.uint32)}, "ancestors must start with"),
        ({"latent": 193}, "latents of 193"),
    ],
)
def test_shapes_that_do_not_match_are_errors(change: dict[str, Any], message: str):
    case = KERNEL_CASES[0]
    q, pages, context = make_arguments(case, jnp.bfloat16)
    seen = {name: x for name, x in change.items() if name in QueryContext._fields}
    changed = {name: x for name, x in change.items() if name not in seen}
    arguments = {"q": q, "pages": pages, "context": context._replace(**seen)}
    with pytest.raises(ValueError, match=message):
        latent_attention(**(arguments | case.options | changed))


@pytest.mark.parametrize("batch", [1, 8, 32, 200])
@pytest.mark.parametrize("tiles", [1, 2, 16, 32])
@pytest.mark.parametrize("slots", [64, 1024, 8192, 1 << 17])
def test_parts_of_contexts_leave_each_multiprocessor_one_block(batch: int, tiles: int, slots: int):
    chosen = latent_tuning(batch, tiles, slots)
    assert chosen.splits == 1 or batch * tiles * chosen.splits <= MULTIPROCESSORS
    assert chosen.splits == 1 or slots // chosen.splits >= 4 * chosen.block
    assert chosen.producer_registers >= 24
