"""What norms give to projections that round what they read to 8-bit floats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.quantization import Scheme
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import ChosenSum, Computed, Linear, RoundedRows
from jaxspec.models.quantized.schemes import ROUNDINGS
from jaxspec.models.readers import OneReader, norm_for, plain_rows
from jaxspec.parallel import Layout
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.selection import NO_KERNELS, Kernels

HIDDEN, EPS = 512, 1e-6
KERNELS = Kernels(frozenset({"add_rms_norm", "round_tokens"}))


def projection(scheme: Scheme | None) -> Any:
    weight = np.random.default_rng(1).standard_normal((HIDDEN, 16), np.float32)
    linear = Linear(weight=jnp.asarray(weight, jnp.bfloat16), axes=("hidden", "heads"))
    return linear if scheme is None else ROUNDINGS[scheme](linear)


def rows(seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((2, 3, HIDDEN), np.float32)
    return jnp.asarray(values, jnp.bfloat16)


def normed(kernels: Kernels, reader: Any, addend: Any) -> Any:
    """Shapes of what the reader would get; no kernel runs on a CPU."""
    step = ForwardPass(dense_causal_attend, {}, {}, EPS, Layout(), kernels)
    weight = jnp.ones(HIDDEN, jnp.bfloat16)
    return jax.eval_shape(lambda x: step.add_norm(x, addend, weight, reader)[1], rows(0))


@pytest.mark.parametrize(("scheme", "groups"), [("fp8", 1), ("fp8-block", HIDDEN // 128)])
def test_a_reader_that_rounds_gets_rounded_rows(scheme: Scheme, groups: int):
    found = normed(KERNELS, projection(scheme), Computed(rows(1)))
    assert isinstance(found, RoundedRows) and found.plain is None
    assert found.values.shape == (2, 3, HIDDEN) and found.scale.shape[0] == groups


def test_other_readers_get_rows_as_they_are():
    """Beside blocks as well; with a scale for each row no launch gives both."""
    found = normed(KERNELS, OneReader(linear=projection("fp8-block")), Computed(rows(1)))
    assert isinstance(found, RoundedRows)
    assert plain_rows(found).shape == (2, 3, HIDDEN)
    for reader in (OneReader(linear=projection("fp8")), OneReader(linear=projection(None)), None):
        assert not isinstance(normed(KERNELS, reader, Computed(rows(1))), RoundedRows)
    assert not isinstance(
        normed(NO_KERNELS, projection("fp8-block"), Computed(rows(1))), RoundedRows
    )


def test_the_reader_multiplies_them_as_it_does_what_it_rounds_itself():
    reader, weight = projection("fp8-block"), jnp.ones(HIDDEN, jnp.bfloat16)
    arguments = rows(0), rows(1)[None], weight, EPS, "reference"
    sums, rounded = norm_for(OneReader(linear=reader), lambda linear, groups: True, *arguments)
    total, plain = norm_for(None, lambda linear, groups: False, *arguments)
    np.testing.assert_array_equal(sums, total)
    np.testing.assert_array_equal(plain_rows(rounded), plain_rows(plain))
    np.testing.assert_array_equal(*(reader(x) for x in (rounded, plain)))


def test_a_norm_adds_up_chosen_products():
    """Its kernel does; without one the sum is computed before."""
    products = ChosenProducts(
        products=jnp.asarray(np.random.default_rng(2).standard_normal((12, HIDDEN), np.float32)),
        places=jnp.arange(12, dtype=jnp.int32).reshape(6, 2).at[5, 1].set(-1),
        weights=jnp.full((6, 2), 0.5),
    )
    addend, weight = ChosenSum(products, rows(0)), jnp.ones(HIDDEN, jnp.bfloat16)
    step = ForwardPass(dense_causal_attend, {}, {}, EPS, Layout(), NO_KERNELS)
    wanted = np.asarray(products.products).reshape(6, 2, HIDDEN) / 2
    wanted[5, 1] = 0
    added = jnp.asarray(wanted[:, 0] + wanted[:, 1]).astype(jnp.bfloat16).reshape(2, 3, HIDDEN)
    total, _ = step.add_norm(rows(0), addend, weight)
    np.testing.assert_array_equal(total, rows(0) + added)
    text = str(jax.make_jaxpr(lambda x: normed_by_kernel(x, addend, weight))(rows(0)))
    assert "add_rms_norm_mosaic" in text and "gather" not in text.split("add_rms_norm_mosaic")[0]


def normed_by_kernel(x: jax.Array, addend: ChosenSum, weight: jax.Array) -> Any:
    step = ForwardPass(dense_causal_attend, {}, {}, EPS, Layout(), KERNELS)
    return step.add_norm(x, addend, weight)
