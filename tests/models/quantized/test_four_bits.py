"""Numbers of 4 bits against a table look-up, and the worked values of their formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.four_bits import scaled_groups, widened_pairs, widened_scales

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])
BYTES = np.arange(256, dtype=np.uint8)


def test_every_byte_is_two_numbers_the_low_half_first():
    for code, table in (("e2m1", E2M1), ("int4", np.arange(16, dtype=np.float32) - 8)):
        found = np.asarray(jax.jit(widened_pairs, static_argnums=1)(BYTES[:, None], code))
        wanted = np.stack([table[BYTES & 15], table[BYTES >> 4]], axis=-1)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))  # -0, too


def test_a_group_of_gpt_oss():
    """The byte 0xA7 with the scale 125 holds the weights 6 / 4 and -1 / 4."""
    pairs, scales = jnp.full((1, 16), 0xA7, jnp.uint8), jnp.full((1, 1), 125, jnp.uint8)
    weights = scaled_groups(widened_pairs(pairs, "e2m1"), widened_scales(scales))
    np.testing.assert_array_equal(weights, np.tile([1.5, -0.25], (1, 16)))


def test_every_code_is_exact_in_bfloat16_with_every_exponent():
    """Of bytes from 2 on: less are below the least normal number."""
    exponents = BYTES[2:253, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(exponents), 1))
    pairs = jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4)
    weights = scaled_groups(widened_pairs(pairs, "e2m1"), widened_scales(jnp.asarray(exponents)))
    wanted = np.ldexp(E2M1, exponents.astype(np.int32) - 127)
    for found in (weights, weights.astype(jnp.bfloat16)):
        np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)


def test_scales_that_are_numbers_and_zeros():
    numbers = jnp.asarray(np.arange(8, dtype=np.float32).reshape(2, 4))
    scales = np.array([[2, 0.5], [1, 4]], ml_dtypes.float8_e4m3fn)
    zeros = jnp.array([[1.0, 0.0], [4.0, -2.0]])
    found = scaled_groups(numbers, widened_scales(jnp.asarray(scales)), zeros)
    np.testing.assert_array_equal(found, [[-2, 0, 1, 1.5], [0, 1, 32, 36]])
