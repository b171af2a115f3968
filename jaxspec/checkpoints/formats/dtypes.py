"""The dtypes of quantized weights and their scales, by the names that safetensors has for them."""

from types import MappingProxyType

import jax.numpy as jnp

DTYPES = MappingProxyType(
    {
        "I4": jnp.dtype("int4"),
        "U8": jnp.dtype("uint8"),
        "I8": jnp.dtype("int8"),
        "F8_E4M3": jnp.dtype("float8_e4m3fn"),
        "F16": jnp.dtype("float16"),
        "BF16": jnp.dtype("bfloat16"),
        "F32": jnp.dtype("float32"),
    }
)
