"""Experts as the kernel packed_expert_product reads them, beside those of files."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.attention import PagedAttend
from jaxspec.models.mlps import mix
from jaxspec.models.quantized.float8_experts import Float8Experts
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.quantized.packed_experts import PackedExpertLinear, packed_experts
from pallas_kernels.expert_product import expert_product
from pallas_kernels.expert_slots import MOST_ROWS as KERNEL_ROWS
from pallas_kernels.expert_slots import SlotProducts, make_slots
from pallas_kernels.packed_expert_product import packed_expert_product
from pallas_kernels.packed_expert_product.mosaic_gpu import (
    packed_expert_product_mosaic,
    packed_expert_slots_mosaic,
)
from pallas_kernels.packed_experts import FORMATS
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.kernels import interpreted
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_experts import random_bytes, random_own, random_rows
from tests.helpers.random_models import as_dtype

# Each is one program, not one for every operation.
jit_packed = jax.jit(packed_experts, compiler_options=FAST_COMPILE)
jit_chosen = jax.jit(mix.chosen_experts, compiler_options=FAST_COMPILE)


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def widened(experts: Any, index: Any) -> Any:
    return experts.of(index)


def in_8_bits(shape: tuple[int, ...], axes: tuple[str, ...], form: str) -> Float8Experts:
    """Random experts [E, in, *out]."""
    experts, size, *lead, width = shape
    values = random_bytes((experts, *lead, width, size), "e4m3").view(jnp.float8_e4m3fn)
    rows, columns = block = FORMATS[form].block
    blocks, random = (experts, *lead, -(-width // rows), -(-size // columns)), np.random.default_rng
    scale = random(1).uniform(0.5, 1.5, blocks).astype(np.float32) * size**-0.5 / 128
    if form == "mxfp8":
        scale = random(1).integers(112, 118, blocks, np.uint8)
    return Float8Experts(
        values=jax.device_put(values),
        scale=jax.device_put(scale),
        axes=axes,
        block=block,
        activations=jnp.dtype("bfloat16"),
    )


def in_4_bits(shape: tuple[int, ...], axes: tuple[str, ...], form: str) -> FourBitExperts:
    """Random experts [E, in, *out], with factors."""
    experts, size, *outputs = shape
    random, code = np.random.default_rng(2), FORMATS[form].code
    assert code != "e4m3"
    by_group = (experts, *outputs, max(1, size // FORMATS[form].block[1]))
    scale = random.integers(118, 124, by_group).astype(np.uint8)
    if form == "int4":
        scale = (2.0 ** (scale.astype(np.float32) - 127)).astype(jnp.bfloat16)
    zero = random.integers(-8, 9, by_group).astype(jnp.float16)
    if form == "int4-zeros":
        scale = (2.0 ** (scale.astype(np.float32) - 127)).astype(jnp.float16)
    if form == "nvfp4":
        scale = (random.normal(size=by_group) / 64).astype(jnp.float8_e4m3fn)
        assert (scale == 0).any() and (scale < 0).any()
    return FourBitExperts(
        pairs=jax.device_put(random_bytes((experts, *outputs, size // 2), code)),
        scale=jax.device_put(scale),
        zero=jax.device_put(zero) if FORMATS[form].has_zero else None,
        factor=as_dtype(random.uniform(0.5, 1.5, (experts, *outputs)), np.float32),
        axes=axes,
        code=code,
        activations=jnp.dtype("bfloat16"),
    )


def bytes_of(experts: Any) -> int:
    """Of numbers and scales."""
    values = experts.values if isinstance(experts, Float8Experts) else experts.pairs
    return values.nbytes + experts.scale.nbytes


def packed_own(form: str) -> tuple[Any, Any]:
    """LocalExperts of 6 experts as a file has them, and as the kernel reads them."""
    own = random_own(6, 128, 64, None)
    gate_up, down = ((6, 128, 2, 64), own.gate_up.axes), ((6, 64, 128), own.down.axes)
    make = in_8_bits if FORMATS[form].code == "e4m3" else in_4_bits
    stored = own.replace(gate_up=make(*gate_up, form), down=make(*down, form))
    packed = [jit_packed(linear) for linear in (stored.gate_up, stored.down)]
    assert all(isinstance(linear, PackedExpertLinear) for linear in packed)
    return stored, stored.replace(gate_up=packed[0], down=packed[1])


def one_row(nodes: int, tokens: int) -> PagedAttend:
    """Of consecutive tokens of a sequence; the others are padding."""
    lens = jnp.zeros(1, jnp.int32)
    return PagedAttend(
        rows=lens,
        page_table=lens[None],
        context_lens=lens,
        slots=jnp.zeros((1, nodes), jnp.int32),
        positions=lens,
        kv_lens=lens + tokens,
    )


@pytest.mark.parametrize("form", ["nvfp4", *map(slow, sorted({*FORMATS} - {"nvfp4"}))])
def test_experts_of_a_file_are_the_same_as_the_kernel_reads_them(form: str):
    stored, packed = packed_own(form)
    index = np.array([[5, 0], [3, 5]], np.int32)
    for ours, theirs in ((packed.gate_up, stored.gate_up), (packed.down, stored.down)):
        assert ours.values.nbytes + ours.scale.nbytes == bytes_of(theirs)
        for some in (index, np.int32(2)):
            np.testing.assert_array_equal(widened(ours, some), widened(theirs, some))


class Interpreted:
    """A ForwardPass whose kernel is interpreted."""

    attend = None  # it does not say which rows are tokens

    def packed_expert_product(self, *arguments: Any) -> Any:
        *arrays, activation = arguments
        assert activation is None and len(arrays[0]) <= mix.MOST_ROWS
        return interpreted(packed_expert_product_mosaic, *arrays, clamp=None)


@pytest.mark.slow  # by default: in an engine, below
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_mixture_by_the_kernel_is_that_of_widened_experts(form: str):
    stored, packed = packed_own(form)
    x, routes = random_rows(5, 128, 6, 3, seed=1)
    x = as_dtype(x, jnp.bfloat16)
    step: Any = Interpreted()
    found = mix.by_kernel(packed, x, routes, step)
    wanted = np.asarray(jit_chosen(stored, x, routes))
    assert found is not None
    assert np.linalg.norm(np.asarray(found) - wanted) <= 1e-2 * np.linalg.norm(wanted)
    assert mix.by_kernel(stored, x, routes, step) is None


def test_in_an_engine_products_of_experts_are_not_added_up_yet(monkeypatch: pytest.MonkeyPatch):
    """Their sums are those of widened experts; padding has none, whatever the kernel leaves."""
    stored, packed = packed_own("fp8")
    x, routes = random_rows(5, 128, 6, 3, seed=1)
    x = as_dtype(x, jnp.bfloat16)

    def by_interpreter(x: Any, routes: Any, gate_up: Any, down: Any, *_: Any) -> SlotProducts:
        slots = make_slots(routes.experts, gate_up.packed.num_experts)
        arrays = x, slots, gate_up.packed, down.packed
        found = interpreted(packed_expert_slots_mosaic, *arrays, clamp=None)
        return found._replace(products=jnp.nan_to_num(found.products, nan=1e30))

    monkeypatch.setattr(mix, "slot_products", by_interpreter)
    attend = one_row(nodes=5, tokens=4)
    step: Any = SimpleNamespace(attend=attend, kernels=NO_KERNELS)
    found = mix.products_by_kernel(packed, x, routes, step)
    assert found is not None
    wanted = np.array(jit_chosen(stored, x, routes))
    wanted[4] = 0
    error = np.linalg.norm(np.asarray(found.total()) - wanted)
    assert error <= 1e-2 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_many_rows_are_multiplied_so_many_at_a_time():
    """In parts of equal size, and as together."""
    _, packed = packed_own("int4")
    x, routes = random_rows(KERNEL_ROWS + 100, 128, 6, 2, seed=1)
    sizes = []

    class Reference:
        attend = None

        def packed_expert_product(self, *arguments: Any) -> Any:
            *arrays, _ = arguments
            sizes.append(len(arrays[0]))
            return packed_expert_product(*arrays)

    step: Any = Reference()
    found = mix.by_kernel(packed, jnp.asarray(x, jnp.float32), routes, step)
    wanted = mix.blocks_of_experts(packed, jnp.asarray(x, jnp.float32), routes)
    assert found is not None and mix.MOST_ROWS < max(sizes) <= KERNEL_ROWS
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-2 * float(jnp.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.parametrize("paged", [True, False])
def test_prompts_go_through_the_kernel_of_wide_experts(paged: bool):
    """In parts, and as together; training, whose gradient would gather weights, does not."""
    rows, sizes = KERNEL_ROWS + 100, []
    own, (x, routes) = random_own(6, 64, 8, None), random_rows(rows, 64, 6, 2, seed=1)

    class Reference:
        attend = one_row(nodes=rows, tokens=rows - 1) if paged else None

        def expert_product(self, *arguments: Any) -> Any:
            *arrays, _ = arguments
            sizes.append(len(arrays[0]))
            return expert_product(*arrays)

    step: Any = Reference()
    found = mix.by_kernel(own, jnp.asarray(x), routes, step)
    assert (found is not None) == paged
    if found is not None:
        assert mix.MOST_ROWS < max(sizes) <= KERNEL_ROWS
        wanted = np.array(mix.blocks_of_experts(own, jnp.asarray(x), routes))
        wanted[-1] = 0
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_experts_of_other_formats_stay_as_they_are():
    """With scales that the kernel does not take, and of sizes that it does not."""
    axes = ("experts", "embed", "mlp")
    fits = in_4_bits((2, 64, 64), axes, "int4")
    assert isinstance(packed_experts(fits), PackedExpertLinear)
    small = in_4_bits((2, 32, 64), axes, "int4")
    floats = in_4_bits((2, 64, 64), axes, "mxfp4")
    floats = floats.replace(scale=floats.scale.astype(jnp.bfloat16))
    few = by_output(in_8_bits((2, 64, 64), axes, "fp8"))
    for experts in (small, floats, few):
        assert packed_experts(experts) is experts


def by_output(experts: Float8Experts) -> Float8Experts:
    """With a scale for each output."""
    *outputs, size = experts.values.shape
    scale = jnp.asarray(np.random.default_rng(3).uniform(0.5, 1.5, (*outputs, 1)), jnp.float32)
    return experts.replace(block=(1, size), scale=scale)


@pytest.mark.slow
def test_scales_of_outputs_multiply_their_sums():
    own = random_own(6, 128, 64, None)
    stored = by_output(in_8_bits((6, 128, 2, 64), own.gate_up.axes, "fp8"))
    packed, index = packed_experts(stored), jnp.array([[5, 0], [3, 5]])
    assert isinstance(packed, PackedExpertLinear) and packed.factor is not None
    np.testing.assert_array_equal(packed.of(index), stored.of(index))
