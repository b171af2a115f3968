"""Seeds of 32 bits, from what stands for one."""

import functools
from typing import Any

import numpy as np

from jaxspec._lazy import LazyModule

jax: Any = LazyModule("jax")  # host code, which has none, imports this module


def seeds_of_keys(keys: Any) -> Any:
    """What typed keys [...] stand for: uint32 [...]."""
    draw = functools.partial(jax.random.bits, dtype=np.uint32)
    return jax.vmap(draw)(keys.reshape(-1)).reshape(keys.shape)


def one_seed(value: Any) -> Any:
    """The int that a scalar of NumPy or jax, or a typed key, stands for; other values as they are.

    Raises ValueError for arrays with dimensions, and for traced ones.
    """
    if not hasattr(value, "dtype") or not isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return value
    if isinstance(value, jax.core.Tracer):
        raise ValueError("must be known: it is traced, and only make_sampling takes traced seeds")
    if value.ndim:
        raise ValueError(
            f"must be one seed, got shape {list(value.shape)}: take one of them for each request, "
            "and jax.random.key where that is a raw PRNGKey"
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # a key that a jitted function closes over is known
            return int(seeds_of_keys(value))
    return int(value) if jax.numpy.issubdtype(value.dtype, np.integer) else value
