"""ForwardPass.gated_heads: when the gated norm of a delta rule's heads is rounded in its launch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.quantization import Scheme
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, RoundedRows
from jaxspec.models.quantized.schemes import ROUNDINGS
from jaxspec.parallel import Layout
from pallas_kernels.gated_norm import gated_norm_rounded
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.kernels import lowered

GROUPS, HEADS, BATCH, TOKENS = 2, 3, 2, 4
EPS = 1e-6
Given = tuple[Any, Any, Any]  # what gated_heads takes before its reader
KERNELS = Kernels(frozenset({"gated_norm", "round_tokens"}))


def step_with(kernels: Kernels, **layout: Any) -> ForwardPass:
    return ForwardPass(dense_causal_attend, {}, {}, EPS, Layout(**layout), kernels)


def arrays(size: int = 128, tokens: int = TOKENS, dtype: Any = jnp.bfloat16) -> Given:
    """Outputs of heads, what was projected (with their gates last), and the norm's weight."""
    rng = np.random.default_rng(0)
    shape = (BATCH, tokens, GROUPS)
    x = rng.standard_normal((*shape, HEADS, size), np.float32)
    projected = jnp.asarray(rng.standard_normal((*shape, 8 + HEADS * size), np.float32), dtype)
    return jnp.asarray(x), projected, jnp.asarray(rng.standard_normal(size, np.float32))


def output_projection(scheme: Scheme | None, size: int = 128) -> Any:
    weight = np.random.default_rng(1).standard_normal((GROUPS * HEADS * size, 16), np.float32)
    linear = Linear(weight=jnp.asarray(weight, jnp.bfloat16), axes=("heads", "hidden"))
    return linear if scheme is None else ROUNDINGS[scheme](linear)


def written_out(x: Any, projected: Any, norm: Any) -> np.ndarray:
    x, projected, norm = (np.asarray(array, np.float64) for array in (x, projected, norm))
    gates = projected[..., 8:].reshape(x.shape)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * norm
    return (normed * gates / (1 + np.exp(-gates))).reshape(*x.shape[:2], -1)


def chosen(step: ForwardPass, reader: Any, given: Given) -> Any:
    """Shapes of what ``reader`` would get; no kernel runs on a CPU."""
    return jax.eval_shape(lambda x, gates, norm: step.gated_heads(x, gates, norm, reader), *given)


def test_a_reader_of_blocks_gets_rows_with_a_scale_for_each_head():
    rounded = chosen(step_with(KERNELS), output_projection("fp8-block"), arrays())
    assert isinstance(rounded, RoundedRows)
    assert rounded.dtype == jnp.bfloat16
    assert rounded.values.shape == (BATCH, TOKENS, GROUPS * HEADS * 128)
    assert rounded.scale.shape[0] == GROUPS * HEADS and rounded.scale.shape[1] >= BATCH * TOKENS


def test_the_reader_multiplies_them_as_it_does_what_it_rounds_itself():
    (x, projected, norm), reader = arrays(), output_projection("fp8-block")
    step = step_with(NO_KERNELS)
    rows = x.reshape(-1, *x.shape[2:]), projected.reshape(-1, *projected.shape[2:])
    values, scale = gated_norm_rounded(*rows, norm, EPS, "reference")
    values = values.reshape(BATCH, TOKENS, -1)
    rounded = RoundedRows(values=values, scale=scale, dtype=projected.dtype)
    both = rounded, step.gated_heads(x, projected, norm, reader)
    found, expected = (reader.product(y, "o").result(step.layout, NO_KERNELS) for y in both)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_without_kernels_they_are_written_out_in_numpy(dtype: Any):
    given = arrays(dtype=dtype)
    found = step_with(NO_KERNELS).gated_heads(*given, output_projection("fp8-block"))
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), written_out(*given), rtol=2**-7, atol=1e-6
    )


@pytest.mark.parametrize(
    ("scheme", "kernels", "layout", "sizes"),
    [
        (None, KERNELS, {}, {}),
        ("w4a16", KERNELS, {}, {}),
        ("fp8", KERNELS, {}, {}),
        ("fp8-block", NO_KERNELS, {}, {}),
        ("fp8-block", Kernels(frozenset({"gated_norm"})), {}, {}),
        ("fp8-block", KERNELS, {"tokens": ("x",)}, {}),
        ("fp8-block", KERNELS, {}, {"size": 64}),
        ("fp8-block", KERNELS, {}, {"dtype": jnp.float32}),
        ("fp8-block", KERNELS, {}, {"tokens": 257}),
    ],
    ids=[
        *("16 bits", "4 bits", "a scale for all inputs", "no kernels", "no kernel that rounds"),
        *("tokens are split", "heads of 64", "float32", "more rows than the kernel takes"),
    ],
)
def test_others_get_numbers_of_16_or_32_bits(
    scheme: Scheme | None, kernels: Kernels, layout: dict[str, Any], sizes: dict[str, Any]
):
    given, reader = arrays(**sizes), output_projection(scheme, sizes.get("size", 128))
    found = chosen(step_with(kernels, **layout), reader, given)
    assert isinstance(found, jax.ShapeDtypeStruct) and found.dtype == given[1].dtype


@pytest.mark.parametrize(("scheme", "launch"), [("fp8-block", "_rounded"), (None, "")])
def test_on_a_gpu_it_is_one_launch(scheme: Scheme | None, launch: str):
    step, reader = step_with(KERNELS), output_projection(scheme)
    text = lowered(lambda x, gates, norm: step.gated_heads(x, gates, norm, reader), *arrays())
    assert text.count("@mosaic_gpu_v2") == 1
    assert f"gated_norm{launch}_kernel" in text
