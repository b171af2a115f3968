"""Convolutions of DFlash 2: what a GPU's kernels change about their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.heads.convolutions import ConvolutionConfig, ConvolvedMlp
from jaxspec.models.mlps import mlp_shape
from jaxspec.models.mlps.dense import DenseConfig
from jaxspec.parallel import WHOLE
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_arrays

HIDDEN, BF16 = 512, jnp.dtype(jnp.bfloat16)
SPLITTING = Kernels(frozenset({"add_rms_norm"}))  # narrow products give partial sums


@pytest.mark.parametrize("rows", [1, 3])
def test_partial_sums_of_products_give_the_same(rows: int):
    config = DenseConfig(1024)
    mlp = ConvolvedMlp(
        mlp=random_arrays(mlp_shape(config, HIDDEN, BF16), 1),
        convolution=random_arrays(ConvolutionConfig(2, 16).shape(HIDDEN, BF16), 2),
    )
    x = jax.random.normal(jax.random.key(3), (rows, 8, HIDDEN), BF16)

    def run(kernels: Kernels) -> jax.Array:
        positions = jnp.zeros((rows, 8), int)
        step = make_pass((), positions, dense_causal_attend, 1e-5, WHOLE, kernels)
        return mlp(x, step).value

    whole, split = (
        jax.jit(run, static_argnums=0, compiler_options=FAST_COMPILE)(kernels)
        for kernels in (NO_KERNELS, SPLITTING)
    )
    programs = [str(jax.make_jaxpr(run, static_argnums=0)(k)) for k in (NO_KERNELS, SPLITTING)]
    said, down = (f"f32[{{}},{rows},8,{size}]".format for size in (64 * 2, HIDDEN))
    assert all(any(part(n) in programs[1] for n in (2, 4, 8)) for part in (said, down))
    assert not any(part(n) in programs[0] for n in (2, 4, 8) for part in (said, down))
    largest = np.abs(np.asarray(whole, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(split, np.float32), np.asarray(whole, np.float32), atol=largest / 64
    )
