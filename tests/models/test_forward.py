"""Whole sequences through the public functions of a model: what they give, and what they refuse."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxspec import forward, hidden_states, make_mesh
from jaxspec.checkpoints.safetensors_io import load_decoder, save_tree
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.quantized.schemes import in_four_bits
from jaxspec.models.tensors import splitting
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


def assert_close_trees(found: Any, expected: Any) -> None:
    """Arrays of the same shapes, within 2e-5 of the largest entry of each."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        most = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=max(2e-5 * most, 1e-7))


def loss_of(tokens: np.ndarray, target: Decoder, mesh: Mesh | None = None) -> jax.Array:
    return jnp.sum(jnp.sin(hidden_states(target, tokens, mesh=mesh)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(slow(name, 2) for name in ("gemma2", "gpt_oss", "qwen3_moe", "qwen3_next")),
        *(slow(name, 2) for name in ("deepseek_v3", "olmo2")),
        slow("olmo2-mqa", 2),  # a norm of all key heads, which are repeated
        slow("qwen3_moe", (2, 1)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings(LEFT_OUT)
def test_gradients_on_a_mesh_are_those_of_a_device(
    tmp_path: Path, checkpoint, name: str, tensor: Any
):
    directory, tokens, _ = checkpoint(name)
    config, mesh = load_model_config(directory), make_mesh(tensor)
    tokens, dtype = tokens[:, :12], jnp.dtype("float32")
    grad = jit(jax.grad(loss_of, argnums=1), static_argnums=2)
    expected = grad(tokens, load(directory))
    found = grad(tokens, load_decoder(directory, config, dtype, mesh), mesh)
    assert_close_trees(
        tensors_of(found, tmp_path / "mesh"), tensors_of(expected, tmp_path / "device")
    )


def tensors_of(target: Decoder, directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint; of repeated KV heads the last copy."""
    save_tree(directory, target, target.mapped(splitting(target.config.vocab_size)), {})
    return load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_a_target_on_a_trainers_own_mesh_needs_none():
    """FSDP: every array is split along its first dimension."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, P("fsdp" if x.shape[0] % 4 == 0 else None)), TARGET
    )
    grad = jit(jax.grad(loss_of, argnums=1))
    found, expected = grad(TOKENS, jax.device_put(TARGET, shardings)), grad(TOKENS, TARGET)
    assert_close_trees(found, expected)


def test_a_quantized_target_has_logits_and_no_gradient():
    quantized = jit(functools.partial(in_four_bits, mesh=None))(TARGET)
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
