"""Whole sequences through the public functions of a model: what they give, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import forward, hidden_states, make_mesh
from jaxspec.models.quantized.schemes import in_four_bits
from tests.helpers.marks import LEFT_OUT, slow
from tests.helpers.parity import assert_close, load
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_target, tiny_config

TARGET = random_target(tiny_config(num_layers=1))
TOKENS = np.random.default_rng(0).integers(0, 96, (3, 10), np.int32)
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize(
    "name", ["gemma2", slow("qwen3_next"), slow("gpt_oss"), slow("deepseek_v3")]
)
@pytest.mark.filterwarnings(LEFT_OUT)
def test_logits_equal_transformers(checkpoint, name: str):
    """Windows, soft caps, sinks, experts, recurrent and latent mixers."""
    directory, tokens, expected = checkpoint(name)
    lengths = np.array([tokens.shape[1], tokens.shape[1] - 7])
    tokens = tokens.copy()
    tokens[1, lengths[1] :] = -1
    found = np.asarray(jit(forward)(load(directory), tokens, lengths))
    for row, length in enumerate(lengths):
        assert_close(found[row, :length], expected[row, :length])
    assert not found[1, lengths[1] :].any()


def test_a_gradient_is_that_without_recomputing():
    def loss(target, remat: bool) -> jax.Array:
        return jnp.sum(jnp.sin(hidden_states(target, TOKENS, remat=remat)))

    kept, again = (jit(jax.grad(functools.partial(loss, remat=r)))(TARGET) for r in (False, True))
    jaxpr = str(jax.make_jaxpr(jax.grad(functools.partial(loss, remat=True)))(TARGET))
    assert jaxpr.count("remat2") + jaxpr.count("checkpoint[") >= TARGET.config.num_layers
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(one).max())


def test_a_quantized_target_has_logits_and_no_gradient():
    quantized = in_four_bits(TARGET, None)
    logits = jit(forward)(quantized, TOKENS[:, :4])
    assert jnp.isfinite(logits).all()

    def loss(target) -> jax.Array:
        return jnp.sum(hidden_states(target, TOKENS[:, :4]))

    with pytest.raises(ValueError, match=r"quantized, so it has no gradient: layers\[0\].*int4"):
        jit(jax.grad(loss, allow_int=True))(quantized)


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match="target must be a Decoder"):
        forward((TARGET,), TOKENS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\]"):
        forward(TARGET, TOKENS[0])
    with pytest.raises(ValueError, match=r"tokens\[1, 2\] is 96: token ids are 0 to 95"):
        forward(TARGET, np.where(np.arange(30).reshape(3, 10) == 12, 96, TOKENS))
    with pytest.raises(ValueError, match=r"lengths\[0\] is 11"):
        forward(TARGET, TOKENS, [11, 1, 1])
    with pytest.raises(ValueError, match="lengths has 2 entries for 3 rows"):
        forward(TARGET, TOKENS, [1, 1])
    with pytest.raises(ValueError, match="exceeds the model's 1024 positions"):
        forward(TARGET, np.zeros((1, 1025), np.int32))
    with pytest.raises(ValueError, match="is not split as mesh says"):
        forward(TARGET, TOKENS, mesh=make_mesh(2))
    with pytest.raises(ValueError, match="a pipeline has no forward"):
        forward(TARGET.replace(layers=()), TOKENS)
