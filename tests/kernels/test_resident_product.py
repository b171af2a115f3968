"""Products with 4-bit weights, x resident: where things lie; the kernel interpreted, lowered.

The interpreter does not know inlined MLIR, so the arithmetic of addresses is tested in NumPy, and
the rest of the kernel is interpreted without it. Only GPUs run all of it.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.benchmarking.ahead_of_time import compiler_environment, install_command
from jaxspec.benchmarking.compiled_round import parse_kernels
from jaxspec.commands.compiling_process import ROOT
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.packed_product.resident import cases, choose_num_splits, misfit
from pallas_kernels.packed_product.resident.cases import (
    BENCHMARK_CASES,
    LLAMA_8B,
    TEST_CASES,
    TUNED_CASES,
    Case,
    argument_shapes,
    make_arguments,
)
from pallas_kernels.packed_product.resident.kernel import resident_product
from pallas_kernels.packed_product.resident.places import (
    BIAS,
    SPAN,
    unpacked,
    weight_offsets,
    x_offsets,
    x_pieces,
    x_span,
    x_steps,
)
from pallas_kernels.packed_product.resident.registers import reordered
from pallas_kernels.packed_product.resident.tuning import (
    BLOCK,
    MOST_ROWS,
    MULTIPROCESSORS,
    PADDED_ROWS,
    VARIANTS,
    ProductTuning,
    fits,
    groups_of,
    padded_rows,
)
from tests.marks import first_is_fast

WHEELS = Path(os.environ.get("JAXSPEC_AOT_WHEELS", ROOT / ".cache/aot-wheels"))
WARPGROUP = np.arange(128, dtype=np.uint32)
INTERPRETED = TEST_CASES[:-2]  # the others take minutes
GATE_AND_UP = LLAMA_8B["gate and up"]


def exact_parts(case: Case, arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """Partial sums in float64, and the sums of their products' magnitudes: [S, M, out]."""
    x, values, scale = (np.asarray(one, np.float64) for one in arguments[:3])
    zero = 0 if arguments[3] is None else np.asarray(arguments[3], np.float64).T[..., None]
    weights = (values.reshape(*scale.T.shape, -1) - zero) * scale.T[..., None]
    rows = x.reshape(case.rows, case.num_splits, -1).transpose(1, 0, 2)
    by_split = weights.reshape(case.width, case.num_splits, -1).transpose(1, 2, 0)
    return rows @ by_split, abs(rows) @ abs(by_split)


def reference(case: Case, arguments: Any) -> Any:
    return packed_product_reference(
        *arguments, num_splits=case.num_splits, dtype=jnp.dtype("float32")
    )


def assert_exact(found: Any, case: Case, arguments: Any) -> None:
    """Within the rounding of float32 sums."""
    wanted, size = exact_parts(case, arguments)
    assert found.dtype == jnp.float32 and found.shape == wanted.shape
    error = abs(np.asarray(found, np.float64) - wanted)
    assert (error <= case.max_error * size).all(), (error / size).max()
    assert np.linalg.norm(error) <= 1e-5 * np.linalg.norm(wanted)


def test_the_bound_would_notice_rounded_weights():
    case = TEST_CASES[0]
    x, values, scale, zero = make_arguments(case, jnp.bfloat16)
    rounded = scale.astype(jnp.float8_e4m3fn)  # as exact as a float of 4 bits
    found = reference(case, (x, values, rounded.astype(scale.dtype), zero))
    with pytest.raises(AssertionError):
        assert_exact(found, case, (x, values, scale, zero))


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_shapes_are_those_of_arguments(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    for one, shape in zip(arguments, argument_shapes(case, jnp.bfloat16), strict=True):
        assert jax.eval_shape(lambda one=one: one) == shape


# Where things lie.


def in_shared_memory(rows: np.ndarray, line: int) -> np.ndarray:
    """Rows of bytes [n, bytes] as TMA writes them: tiles of 8 rows of a line, pieces permuted."""
    num_rows, size = rows.shape
    flat = np.zeros(num_rows * size, np.uint8)
    row, byte = np.meshgrid(np.arange(num_rows), np.arange(size), indexing="ij")
    tile = row // 8 * (size // line) + byte // line
    address = tile * 8 * line + row % 8 * line + byte % line
    # Hardware permutes by bits of the address: 4 to 6 with 7 to 9, or 4 and 5 with 7 and 8.
    swizzled = address ^ ((address >> 7 & (line // 16 - 1)) << 4)
    flat[swizzled] = rows
    return flat


@pytest.mark.parametrize("block", [256, 512])
@pytest.mark.parametrize(("start", "unit"), [(0, 64), (192, 64), (224, 32)])
def test_threads_load_what_tensor_cores_expect_of_them(block: int, start: int, unit: int):
    values = np.random.default_rng(0).integers(-8, 8, (64, block))
    nibbles = (values & 15).astype(np.uint8)
    packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4  # low bits first, as XLA packs
    words = in_shared_memory(packed, 128).view(np.uint32)
    offsets = weight_offsets(WARPGROUP, start, unit, block // BLOCK)
    expected = np.asarray(reordered(jnp.asarray(values[:, start : start + unit])))
    row, column = WARPGROUP // 32 * 16 + WARPGROUP % 32 // 4, WARPGROUP % 4 * 2
    for index, offset in enumerate(offsets):
        assert (offset % 4 == 0).all()
        for c, pair in enumerate(unpacked(words[offset // 4])):
            numbers = pair.view(np.uint16).reshape(-1, 2).astype(np.uint32) << 16
            found = numbers.view(np.float32) - BIAS
            place = index // 2 * SPAN + 8 * c + column
            for e in range(2):
                wanted = expected[row + index % 2 * 8, place + e]
                np.testing.assert_array_equal(found[:, e], wanted)


def test_loads_of_a_warp_hit_every_bank_once():
    for offset in weight_offsets(WARPGROUP, 0, 64, 1):
        banks = offset.reshape(4, 32) // 4 % 32
        assert (np.sort(banks, axis=1) == np.arange(32)).all()


@pytest.mark.parametrize(("padded", "depth", "unit"), [(8, 256, 64), (24, 1792, 64), (16, 512, 32)])
@pytest.mark.parametrize("warpgroups", [2, 4])
def test_threads_store_rows_as_tensor_cores_read_them(padded, depth, unit, warpgroups):
    x = np.random.default_rng(0).integers(0, 1 << 16, (padded, depth)).astype(np.uint16)
    threads, spans = 128 * warpgroups, depth // SPAN
    stored = np.zeros(padded * depth // 2, np.uint32)
    times = np.zeros(padded * depth // 8, int)
    words = x.reshape(padded, spans, 4, 8).copy().view(np.uint32)
    for step in range(x_steps(threads, spans, padded)):
        thread = np.arange(threads, dtype=np.uint32)
        row, span = x_span(thread, step, threads, spans, padded, np.minimum)
        own = [[words[row, span, t, i] for i in range(4)] for t in range(4)]
        for offset, piece in zip(x_offsets(row, span, unit, padded), x_pieces(own), strict=True):
            times[offset // 16] += 1
            for i, word in enumerate(piece):
                stored[offset // 4 + i] = word
    assert (times > 0).all()
    by_line = np.asarray(reordered(jnp.asarray(x))).reshape(padded, -1, unit).swapaxes(0, 1)
    expected = [in_shared_memory(chunk.copy().view(np.uint8), 2 * unit) for chunk in by_line]
    np.testing.assert_array_equal(stored.view(np.uint8), np.concatenate(expected))


# The kernel.


def interpreted(case: Case, arguments: Any, config: ProductTuning = VARIANTS[0]) -> Any:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    found = resident_product(
        *arguments, num_splits=case.num_splits, config=config, interpret=interpret
    )
    return jax.block_until_ready(found)  # the interpreter's callbacks run jax, too


@first_is_fast(INTERPRETED)
def test_interpreted_it_is_exact(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    assert_exact(interpreted(case, arguments), case, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS[1:], ids=str)
def test_interpreted_every_variant_is_exact(config: ProductTuning):
    case = TEST_CASES[0]
    arguments = make_arguments(case, jnp.bfloat16)
    assert_exact(interpreted(case, arguments, config), case, arguments)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    case = TEST_CASES[0]
    x, *weights = make_arguments(case, jnp.bfloat16)
    together = interpreted(case, (x, *weights))
    alone = interpreted(case, (x[2:3], *weights))
    np.testing.assert_array_equal(together[:, 2], alone[:, 0])
    beside_nan = interpreted(case, (x.at[jnp.array([0, 4])].set(jnp.nan), *weights))
    np.testing.assert_array_equal(together[:, 2], beside_nan[:, 2])


def misfit_of(case: Case, dtype: Any = jnp.bfloat16) -> str | None:
    x, values, scale, zero = argument_shapes(case, dtype)
    return misfit(x, values, scale, zero, case.num_splits)


def lower(case: Case, config: ProductTuning = VARIANTS[0]) -> str:
    arguments = argument_shapes(case, jnp.bfloat16)
    assert misfit_of(case) is None
    function = functools.partial(resident_product, num_splits=case.num_splits, config=config)
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@first_is_fast((*TEST_CASES, *BENCHMARK_CASES), 3)
def test_it_lowers_for_cuda(case: Case):
    text = lower(case)
    assert text.count("mosaic_gpu_v2") == 1
    # The weights go to the kernel as they are, packed.
    assert f"tensor<{case.width}x{case.depth}xi8>" not in text and "bitcast_convert" not in text


@first_is_fast(TUNED_CASES)
def test_every_tuning_lowers_for_cuda(case: Case):
    for config in VARIANTS[1:]:
        assert lower(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_on_the_device_it_is_exact(case: Case, config: ProductTuning):
    if case.depth // case.num_splits % config.block:
        pytest.skip("no whole blocks")
    if case.rows == 64 and config.consumers == 4:
        pytest.skip("their sums leave no shared memory to weights")
    arguments = make_arguments(case, jnp.bfloat16)
    first = resident_product(*arguments, num_splits=case.num_splits, config=config)
    assert_exact(first, case, arguments)
    for _ in range(20):
        again = resident_product(*arguments, num_splits=case.num_splits, config=config)
        assert jnp.array_equal(first, again), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", LLAMA_8B)
def test_on_the_device_large_products_are_the_references(name: str, rows: int):
    width, depth = LLAMA_8B[name]
    case = Case(rows, depth, width, zeros=rows == 16)
    arguments = make_arguments(case, jnp.bfloat16)
    function = jax.jit(functools.partial(resident_product, num_splits=case.num_splits))
    found = function(*arguments)
    expected = jax.jit(functools.partial(reference, case))(arguments)
    error = jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())
    assert error < 1e-5


@pytest.mark.gpu
def test_on_the_device_a_row_does_not_depend_on_the_others():
    case = Case(16, 4096, 4096, zeros=True)
    x, *weights = make_arguments(case, jnp.bfloat16)
    function = functools.partial(resident_product, num_splits=case.num_splits)
    together = function(x, *weights)
    assert jnp.array_equal(function(x[3:12], *weights), together[:, 3:12])
    beside_nan = function(x.at[1].set(jnp.nan), *weights)
    assert jnp.array_equal(beside_nan[:, 2:], together[:, 2:])


COMPILE_PRODUCTS = """
import functools, jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxspec.benchmarking.ahead_of_time import compile_ahead, make_devices
from pallas_kernels.packed_product.resident.cases import LLAMA_8B, Case, argument_shapes
from pallas_kernels.packed_product.resident.kernel import resident_product
from pallas_kernels.packed_product.resident.tuning import DEFAULT, VARIANTS

jax.devices()
place = SingleDeviceSharding(make_devices(1)[0])
cases = [(Case(16, *LLAMA_8B[name][::-1]), DEFAULT) for name in ("qkv", "down", "gate and up")]
cases += [(Case(64, 4096, 4096, 64, zeros=True), DEFAULT)]
cases += [(Case(16, 4096, 4096), config) for config in VARIANTS[1:]]
for case, config in cases:
    arguments = [
        one and jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place)
        for one in argument_shapes(case, jnp.bfloat16)
    ]
    product = functools.partial(resident_product, num_splits=case.num_splits, config=config)
    memory = compile_ahead(jax.jit(product), arguments).memory_analysis()
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    print("bytes", moved, case.num_bytes, memory.temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not WHEELS.is_dir(), reason=f"no compiler for GPUs; run: {install_command(WHEELS)}"
)
def test_compiled_they_spill_nothing_and_copy_no_weights(tmp_path: Path):
    """In a process of its own: jax reads the environment only when it starts."""
    inherited = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_PRODUCTS],
        env=compiler_environment(WHEELS, tmp_path, inherited),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:]
    kernels = parse_kernels(result.stdout)
    assert len(kernels) == 7 and {kernel.name for kernel in kernels} == {"resident_product"}
    assert not [kernel for kernel in kernels if kernel.spilled_bytes]
    # 168 is what three warpgroups may have each at launch, 96 what five may.
    assert sorted({kernel.registers for kernel in kernels})[-1] <= 168
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("bytes ")]
    assert len(lines) == 7
    for moved, expected, temporary in lines:
        assert (moved, temporary) == (expected, "0")  # 4-bit weights stay packed


# What it takes, and how it divides it.


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (Case(1, 256, 64), jnp.float32, "must be bfloat16"),
        (Case(1, 256, 64, scale_dtype=jnp.float32), jnp.bfloat16, "of 16 bits"),
        (Case(65, 256, 64, splits=1), jnp.bfloat16, "65 rows: from 1 to 64"),
        (Case(1, 256, 96, 256), jnp.bfloat16, "multiples of 256 and 64"),
        (Case(1, 384, 64, 384, splits=1), jnp.bfloat16, "multiples of 256 and 64"),
        (Case(1, 768, 64, 192, splits=1), jnp.bfloat16, "groups of 192"),
        (Case(1, 256, 64, 16), jnp.bfloat16, "groups of 16 inputs"),
        (Case(16, 14336, 64, 128, splits=1), jnp.bfloat16, "see choose_num_splits"),
        (Case(8, 14336, 64, 32, zeros=True, splits=2), jnp.bfloat16, "448 groups: scales of a"),
        (Case(1, 1024, 64, 128, splits=8), jnp.bfloat16, "8 parts of 1024 inputs"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_unsupported_arguments_are_named(case: Case, dtype: Any, message: str):
    found = misfit_of(case, dtype)
    assert found is not None and message in found


def test_impossible_tunings_are_named():
    with pytest.raises(ValueError, match="multiples of 256"):
        ProductTuning(block=128)
    with pytest.raises(ValueError, match="1 blocks for 2 warpgroups"):
        ProductTuning(most_stages=1)
    with pytest.raises(ValueError, match="splits of 256 in blocks of 512"):
        lower(TEST_CASES[1], VARIANTS[1])
    with pytest.raises(ValueError, match=f"65 rows: at most {MOST_ROWS}"):
        padded_rows(65)


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("name", LLAMA_8B)
def test_splits_keep_the_multiprocessors_busy(name: str, rows: int):
    width, depth = LLAMA_8B[name]
    splits = choose_num_splits(rows, depth, width)
    assert fits(padded_rows(rows), depth, splits)
    items = -(-width // 64 // groups_of(splits, width))
    share = splits * (width // 64) / (items * MULTIPROCESSORS)
    assert share >= (0.94 if rows <= 16 else 0.84)  # of the multiprocessors' time
    assert misfit_of(Case(rows, depth, width)) is None


def test_splits_depend_on_the_padded_rows_only():
    width, depth = GATE_AND_UP
    below = 0
    for padded in PADDED_ROWS:
        chosen = {choose_num_splits(rows, depth, width) for rows in range(below + 1, padded + 1)}
        assert len(chosen) == 1
        below = padded


def test_the_device_times_every_tuning(monkeypatch: pytest.MonkeyPatch):
    assert not cases.benchmarks()
    monkeypatch.setattr(cases, "implementation_to_time", lambda: "mosaic_gpu")
    tuned = cases.benchmarks()[len(BENCHMARK_CASES) :]
    assert len(tuned) == len(TUNED_CASES) * (len(VARIANTS) - 1)
    assert len({one.name for one in tuned}) == len(tuned)
    assert {case.name for case in TUNED_CASES} == set(LLAMA_8B) - {"LM head"}


def test_a_benchmark_names_its_bytes():
    case = Case(2, 4096, 4096, splits=2)
    assert case.num_bytes == 8388608 + 2 * 4096 * 32 + 2 * 2 * 4096 + 4 * 2 * 2 * 4096
    assert dataclasses.replace(case, zeros=True).num_bytes == case.num_bytes + 2 * 4096 * 32
