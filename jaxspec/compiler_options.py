"""Options of XLA for the engine's programs."""

from collections.abc import Mapping
from types import MappingProxyType

import jax

DETERMINISTIC: Mapping[str, bool | int] = MappingProxyType(
    {
        "xla_allow_excess_precision": False,
        # With timings the choice could be another one in the next process, or in another program.
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,  # without timings its tiles are small
    }
)


def compiler_options(array: jax.Array, *, deterministic: bool) -> dict[str, str | int | bool]:
    """For programs that run where an array is, as jax.jit takes them.

    ``deterministic``: see deterministic.py.

    A CPU's programs are compiled in three quarters of the time at LLVM's level 1, and are as fast:
    their time goes into matrix products, which are library calls.
    """
    own: dict[str, str | int | bool] = dict(DETERMINISTIC) if deterministic else {}
    # With this setting JAX asks for less than level 1.
    platforms = {device.platform for device in array.sharding.device_set}
    if platforms != {"cpu"} or jax.config.read("jax_disable_most_optimizations"):
        return own
    return own | {"xla_backend_optimization_level": 1}
