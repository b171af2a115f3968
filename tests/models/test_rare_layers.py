"""What a single family has, written out in NumPy: norms after the rotation, norms that subtract the
mean, MLPs without a gate. test_parity.py compares whole models."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.checkpoint_files import scan
from jaxspec.checkpoints.safetensors_io import load_tree, placements, save_tree
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import XieluConfig
from jaxspec.config.rope import RopeConfig, YarnRopeScaling
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.mlps.xielu import Xielu, xielu_shape
from jaxspec.models.norms import layer_norm, norms_before_rope
from jaxspec.models.rope import rope_angles
from jaxspec.models.tensors import joining, splitting
from jaxspec.parallel import ONE_SHARD, WHOLE
from pallas_kernels.rope_kv_write.reference import apply_rope, rotated_heads
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.random_models import random_arrays

EPS = 1e-5
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def test_norms_before_the_rotation_stand_for_those_after_it():
    qkv, q_norm, k_norm = numbers(1, 3, 1, 3, 8), numbers(8), numbers(8)  # a query, a key, a value

    @jax.jit
    def both(qkv: Any) -> tuple[Any, ...]:
        angles = rope_angles(RopeConfig(8, 1e4), jnp.array([[0, 5, 900]]))
        unit, weights = norms_before_rope(jnp.asarray(q_norm), jnp.asarray(k_norm))
        q, k, _ = rotated_heads(qkv, angles, unit, unit, EPS)
        return q[0, :, 0] * weights, k[0, :, 0], apply_rope(qkv, angles)[0, :, 0]

    q, k, rotated = map(np.asarray, both(qkv))
    expected = normed(rotated[:, 0], q_norm) @ normed(rotated[:, 1], k_norm).T
    np.testing.assert_allclose(q @ k.T, expected, atol=1e-5)


def test_norms_after_a_rotation_that_multiplies_are_refused():
    yarn = RopeConfig(8, 1e4, YarnRopeScaling(4.0, 64, 1.1))
    with pytest.raises(ValueError, match="norm_after_rope: yarn and longrope multiply heads"):
        AttentionConfig(1, 1, yarn, qk_norm=True, norm_after_rope=True)
    with pytest.raises(ValueError, match="norm_after_rope is for qk_norm of each head"):
        AttentionConfig(1, 1, RopeConfig(8, 1e4), norm_after_rope=True)


def test_layer_norm_subtracts_the_mean():
    x, weight = 3 + numbers(2, 8), numbers(8)
    expected = normed(x - x.mean(axis=-1, keepdims=True), weight)
    found = layer_norm(jnp.asarray(x), jnp.asarray(weight), EPS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def random_xielu() -> Xielu:
    shapes = xielu_shape(XieluConfig(6), 4, jnp.dtype(jnp.float32), ONE_SHARD)
    return random_arrays(shapes, 1).replace(beta=jnp.array([0.5]), eps=jnp.array([-1e-6]))


def test_xielu_is_a_parabola_above_zero_and_bends_below():
    mlp, x = random_xielu(), numbers(1, 5, 4)
    step = make_pass((), jnp.zeros((1, 5), int), dense_causal_attend, EPS, WHOLE, NO_KERNELS)
    found = jax.jit(lambda x: mlp(x, step).result(WHOLE, NO_KERNELS))(x)
    up = x @ np.asarray(mlp.up.weight)
    alpha_p, alpha_n = (np.log1p(np.exp(float(a[0]))) for a in (mlp.alpha_p, mlp.alpha_n))
    below = (np.expm1(np.minimum(up, -1e-6)) - up) * (0.5 + alpha_n)
    units = np.where(up > 0, alpha_p * up * up, below) + 0.5 * up
    np.testing.assert_allclose(found, units @ np.asarray(mlp.down.weight), atol=1e-5)


def test_numbers_without_dimensions_are_read_and_written(tmp_path: Path):
    mlp = random_xielu()
    splits = mlp.mapped("", splitting())
    save_tree(tmp_path, mlp, splits, {})
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["mlp.act_fn.beta"].shape == () and tensors["mlp.act_fn.alpha_p"].shape == (1,)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mlp)
    read = load_tree(scan(tmp_path), shapes, splits, placements(shapes, None))
    joined = shapes.mapped("", joining({name: jnp.asarray(x) for name, x in tensors.items()}))
    for other in (read, joined):
        assert all(map(np.array_equal, jax.tree.leaves(other), jax.tree.leaves(mlp)))
