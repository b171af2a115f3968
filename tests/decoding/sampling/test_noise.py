"""Random numbers as a function of seed, stream, position and token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxspec.decoding.sampling.noise import Stream, gumbel, threefry, uniform
from tests.helpers.p_values import kolmogorov_smirnov

jit_gumbel, jit_uniform = (jax.jit(noise, static_argnums=1) for noise in (gumbel, uniform))


def test_blocks_are_those_of_jax():
    key, other_key, word, other_word = words = np.random.default_rng(0).integers(
        2**32, size=(4, 100), dtype=np.uint32
    )
    found = jax.jit(threefry)(*words)
    for i in range(len(word)):
        expected, _ = threefry_2x32((key[i], other_key[i]), jnp.array([word[i], other_word[i]]))
        assert found[i] == expected


def test_noise_belongs_to_seed_stream_position_and_token():
    seeds, positions, ids = (
        np.array([3, 3, 4]),
        np.array([[0, 1], [1, 9], [0, 1]]),
        np.arange(50),
    )
    noise = np.asarray(jit_gumbel(seeds, Stream.TARGET, positions, ids))  # [3, 2, 50]
    assert np.array_equal(noise[0, 1], noise[1, 0]), "same seed and position"
    assert np.array_equal(noise[..., 7:9], jit_gumbel(seeds, Stream.TARGET, positions, ids[7:9]))
    other_stream = np.asarray(jit_gumbel(seeds, Stream.DRAFT, positions, ids))
    for other in (noise[0, 1], noise[2, 0], other_stream[0, 0]):
        assert abs(np.corrcoef(noise[0, 0], other)[0, 1]) < 0.5
        assert not (noise[0, 0] == other).any()


def test_noise_may_be_mapped_over_seeds():
    positions, ids = jax.device_put((np.arange(6).reshape(2, 3), np.arange(5)))
    seeds = np.array([[1, 2], [3, 4]])
    mapped = jax.jit(jax.vmap(lambda seeds: gumbel(seeds, Stream.TARGET, positions, ids)))(seeds)
    for row, noise in zip(seeds, np.asarray(mapped), strict=True):
        assert np.array_equal(noise, jit_gumbel(row, Stream.TARGET, positions, ids))


@pytest.mark.parametrize("stream", list(Stream))
def test_noise_has_its_distribution(stream: Stream):
    seeds, positions, ids = np.arange(50), np.tile(np.arange(40), (50, 1)), np.arange(100)
    flat = np.asarray(jit_uniform(seeds, stream, positions, ids)).ravel()
    assert flat.min() > 0 and flat.max() < 1
    assert kolmogorov_smirnov(flat, lambda x: x) > 1e-3
    noise = np.asarray(jit_gumbel(seeds, stream, positions, ids)).ravel()
    assert kolmogorov_smirnov(noise, lambda x: np.exp(-np.exp(-x))) > 1e-3
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03


def test_uniform_noise_is_never_0_or_1(monkeypatch: pytest.MonkeyPatch):
    extremes = jnp.array([[[0, 2**32 - 1]]], jnp.uint32)
    monkeypatch.setattr("jaxspec.decoding.sampling.noise.threefry", lambda *words: extremes)
    zero = jnp.zeros(1, int)
    low, high = uniform(zero, Stream.ACCEPT, zero[None], jnp.arange(2))[0, 0]
    assert 0 < low < 1e-9 and 1 - 1e-6 < high < 1
    assert jnp.isfinite(gumbel(zero, Stream.TARGET, zero[None], jnp.arange(2))).all()
