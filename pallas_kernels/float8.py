"""Keys and values in pages of 8-bit floating-point numbers (e4m3), with a scale for each KV head.

A number is divided by its head's scale, saturated at 448, and rounded to the nearest e4m3 number.
Infinity thus becomes 448; NaN stays NaN. What is stored depends on the number and the scale alone.

Pages hold the numbers' bytes, as uint8. XLA has no gather or scatter of float8 on some devices: it
would convert whole pools to float16 and back in every layer (seen on CPUs, jax 0.11 and 0.12).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

FLOAT8 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3fn, which has no infinity
BYTES = jnp.dtype("uint8")  # of pages


def is_float8(pages: Array) -> bool:
    """Whether pages hold bytes of e4m3 numbers."""
    return pages.dtype == BYTES


def encode(x: Array, scale: Array) -> Array:
    """The bytes of x [..., G, D], floats, with scales [G]."""
    return to_bytes(x.astype(jnp.float32) / scale[:, None])


def to_bytes(x: Array) -> Array:
    """The bytes of float32 numbers, saturated."""
    return lax.bitcast_convert_type(jnp.clip(x, -LARGEST, LARGEST).astype(FLOAT8), BYTES)


def decode(rows: Array, dtype: jax.typing.DTypeLike) -> Array:
    """The numbers of bytes, not yet multiplied by their scales; exact in any float ``dtype``. Other
    arrays than bytes are returned as they are."""
    if not is_float8(rows):
        return rows
    return lax.bitcast_convert_type(rows, FLOAT8).astype(dtype)


def check_scales(k_pages: Array, v_pages: Array, k_scale: Array | None, v_scale: Array | None):
    """Raises ValueError unless there are scales [G] exactly if pages [P, G, K, D] hold bytes."""
    for pages, scale in ((k_pages, k_scale), (v_pages, v_scale)):
        if is_float8(pages) != (scale is not None):
            raise ValueError(
                f"pages of {pages.dtype} {'without' if scale is None else 'with'} a scale: pages "
                "of bytes (float8) have one for each KV head, others have none; make the state "
                "with the parameters that it is used with"
            )
        if scale is not None and scale.shape != pages.shape[1:2]:
            raise ValueError(f"scales {scale.shape} do not fit pages {pages.shape}: one a KV head")
