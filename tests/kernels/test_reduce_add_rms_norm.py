"""Sum over devices, residual addition and norm: the reference, and the Hopper kernel lowered, run.

The interpreter of Mosaic kernels does not know inlined MLIR, so only GPUs run the kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.reduce_add_rms_norm import reduce_add_rms_norm
from pallas_kernels.reduce_add_rms_norm.cases import (
    AXIS,
    EPS,
    TEST_CASES,
    Case,
    make_arguments,
    on_mesh,
)
from pallas_kernels.reduce_add_rms_norm.exchange import DEVICES, Tuning, make_exchange
from tests.marks import first_is_fast
from tests.programs import FAST_COMPILE

CALLS = 50
EXACT = {"xla_allow_excess_precision": False}  # it rounds where the reference says so


def mesh_of(devices: int) -> Mesh:
    if len(jax.devices()) < devices:
        pytest.skip(f"{devices} devices are needed")
    return Mesh(np.array(jax.devices()[:devices]), AXIS)


def exchange_shape(mesh: Mesh, case: Case, tuning: Tuning | None = None) -> jax.ShapeDtypeStruct:
    tuning = tuning or Tuning.of(mesh.size, case.hidden)
    words = tuning.words(mesh.size, case.hidden)
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.ShapeDtypeStruct((mesh.size, words), jnp.int32, sharding=sharding)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


@pytest.mark.parametrize("devices", DEVICES)
@first_is_fast(TEST_CASES, 3)
def test_all_devices_get_the_sum_and_its_norm(case: Case, devices: int):
    arguments = make_arguments(case, devices)
    run = jax.jit(on_mesh(mesh_of(devices), "reference"), compiler_options=FAST_COMPILE)
    totals, norms = run(*arguments, None)
    x, partials, weight = map(wide, arguments)
    wanted = x + partials.sum((0, 1))[: case.rows]
    expected = wanted / np.sqrt((wanted**2).mean(-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(totals, np.stack([wanted] * devices), atol=2e-5)
    np.testing.assert_allclose(norms, np.stack([expected] * devices), atol=2e-5)


@pytest.mark.parametrize("devices", DEVICES)
def test_the_sum_is_rounded_once_in_the_order_of_the_devices(devices: int):
    case = TEST_CASES[0]
    x, partials, weight = make_arguments(case, devices, jnp.bfloat16)
    run = jax.jit(on_mesh(mesh_of(devices), "reference"), compiler_options=FAST_COMPILE)
    totals, norms = run(x, partials, weight, None)
    product = np.zeros((case.rows, case.hidden), np.float32)
    for part in np.asarray(partials, np.float32)[:, 0]:
        product += part
    expected = x + jnp.asarray(product).astype(jnp.bfloat16)
    for total, norm in zip(totals, norms, strict=True):
        assert jnp.array_equal(total, expected) and jnp.array_equal(norm, norms[0])


@pytest.mark.parametrize("devices", DEVICES)
@first_is_fast(TEST_CASES, 3)
def test_it_lowers_for_cuda(case: Case, devices: int):
    mesh = mesh_of(devices)
    arguments = jax.eval_shape(lambda: make_arguments(case, devices, jnp.bfloat16))
    run = jax.jit(on_mesh(mesh, "mosaic_gpu")).trace(*arguments, exchange_shape(mesh, case))
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    # One launch: no barrier before it, and no semaphores for XLA to clear.
    assert text.count("mosaic_gpu_v2") == 1 and "skip_device_barrier = true" in text
    assert "all_reduce" not in text and "all_gather" not in text


@pytest.mark.parametrize("one_shot", [True, False])
def test_a_call_takes_another_tuning(one_shot: bool):
    """Either way for any number of rows, also for more than by default; without global state."""
    mesh, case = mesh_of(4), Case(1024, 4096)
    tuning = Tuning.forced(4, 4096, 1024, one_shot=one_shot)
    assert tuning is not None
    arguments = jax.eval_shape(lambda: make_arguments(case, 4, jnp.bfloat16))
    call = jax.jit(on_mesh(mesh, "mosaic_gpu", tuning))
    text = call.trace(*arguments, exchange_shape(mesh, case, tuning))
    assert text.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
    with pytest.raises(ValueError, match="the kernel cannot take an exchange of int32"):
        call.trace(*arguments, exchange_shape(mesh, case))  # made for another tuning
    with pytest.raises(ValueError, match="1024 rows: at most 512"):
        jax.eval_shape(on_mesh(mesh, "mosaic_gpu"), *arguments, exchange_shape(mesh, case))
    assert Tuning.forced(8, 2560, 4, one_shot=False) is None  # five columns for eight devices


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (Case(1, 768), {}, "a multiple of 512"),
        (Case(600, 512), {}, "at most 512"),
        (Case(1, 512), {"dtype": jnp.float32}, "both must be bfloat16"),
        (Case(1, 512), {"exchange": None}, "make one with make_exchange"),
        (Case(1, 512), {"exchange": Case(1, 1024)}, "an exchange of int32"),
        (Case(1, 512), {"devices": 3}, "3 devices"),
    ],
    ids=["width", "rows", "dtype", "exchange", "other", "devices"],
)
def test_unsupported_arguments_are_named(case: Case, changes: dict[str, Any], message: str):
    mesh = mesh_of(changes.get("devices", 2))
    dtype = changes.get("dtype", jnp.bfloat16)
    arguments = jax.eval_shape(lambda: make_arguments(case, mesh.size, dtype))
    other = changes.get("exchange", case)
    exchange = other and exchange_shape(mesh, other)
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        jax.eval_shape(on_mesh(mesh, "mosaic_gpu"), *arguments, exchange)


def test_without_peers_that_reach_each_other_there_is_no_exchange():
    assert make_exchange(mesh_of(2), AXIS, 4096) is None  # on a CPU


def many_calls(mesh: Mesh, case: Case, tuning: Tuning | None = None) -> Any:
    """A program of CALLS calls, one after the other. It returns the results of all calls on all
    devices, [devices, CALLS, B, H] each."""

    def of_device(x: Array, partials: Array, weight: Array, exchange: Array | None) -> Any:
        implementation = "reference" if exchange is None else "mosaic_gpu"

        def step(link: Array, factor: Array) -> Any:
            scaled = partials[0] * factor.astype(partials.dtype)
            both = reduce_add_rms_norm(
                x + link, scaled, weight, EPS, AXIS, exchange, implementation, tuning
            )
            return both[1][0, 0] * 0, both

        factors = 1 + jnp.arange(CALLS) / 64
        results = lax.scan(step, jnp.zeros((), x.dtype), factors)[1]
        return jax.tree.map(lambda array: array[None], results)

    split = P(AXIS)
    in_specs = (P(), split, P(), split)
    mapped = jax.shard_map(
        of_device, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False
    )
    return jax.jit(mapped, compiler_options=EXACT)


def assert_same(found: Any, expected: Any) -> None:
    """Equal bits on all devices; the reference's sums, and its norms but for the last bits."""
    for one, other in zip(jax.device_get(found), jax.device_get(expected), strict=True):
        assert (one == one[0]).all(), "devices disagree"
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=2**-6, atol=1e-6
        )
    assert (jax.device_get(found[0]) == jax.device_get(expected[0])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_on_the_devices_it_is_the_reference_in_every_call(case: Case, devices: int):
    mesh = mesh_of(devices)
    exchange = make_exchange(mesh, AXIS, case.hidden)
    assert exchange is not None
    run = many_calls(mesh, case)
    for seed in range(3):  # programs after each other use the same exchange
        arguments = make_arguments(case, devices, jnp.bfloat16, seed)
        assert_same(run(*arguments, exchange), run(*arguments, None))


@pytest.mark.gpu
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("rows", [1, 40, 1024])
def test_on_the_devices_both_ways_are_the_reference(rows: int, one_shot: bool, devices: int):
    mesh, case = mesh_of(devices), Case(rows, 4096)
    tuning = Tuning.forced(devices, 4096, 1024, one_shot=one_shot)
    exchange = make_exchange(mesh, AXIS, 4096, tuning)
    assert exchange is not None
    run, arguments = many_calls(mesh, case, tuning), make_arguments(case, devices, jnp.bfloat16)
    assert_same(run(*arguments, exchange), run(*arguments, None))


@pytest.mark.gpu
@pytest.mark.parametrize("devices", DEVICES)
def test_calls_of_all_sizes_share_an_exchange(devices: int):
    """With more rows and fewer, in one program, again and again."""
    mesh = mesh_of(devices)
    exchange = make_exchange(mesh, AXIS, 4096)
    cases = [Case(rows, 4096) for rows in (1, 6, 300, 2, 48, 1)]
    arguments = [make_arguments(case, mesh.size, jnp.bfloat16, case.rows) for case in cases]

    @functools.partial(jax.jit, compiler_options=EXACT)
    def run(exchange: Array | None) -> Any:
        call = on_mesh(mesh, "reference" if exchange is None else "mosaic_gpu")
        found, link = [], jnp.zeros((), jnp.bfloat16)
        for x, partials, weight in arguments:
            found.append(call(x + link, partials, weight, exchange))
            link = found[-1][1][0, 0, 0] * 0  # each call after the one before it
        return found

    expected = run(None)
    for _ in range(20):
        for one, other in zip(run(exchange), expected, strict=True):
            assert_same(one, other)
