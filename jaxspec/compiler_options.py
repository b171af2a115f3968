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


# A program that reads prompts has hundreds of kernels, most of them longer than their launch. As a
# CUDA graph they would start only when the graph has been updated to this call's buffers.
LAUNCHED_ONE_BY_ONE: Mapping[str, str] = MappingProxyType({"xla_gpu_enable_command_buffer": ""})


def compiler_options(
    array: jax.Array, *, deterministic: bool, reads: bool = False
) -> dict[str, str | int | bool]:
    """For programs that run where an array is, as jax.jit takes them.

    Args:
      deterministic: see deterministic.py.
      reads: whether they read prompts.

    A CPU's programs are compiled in three quarters of the time at LLVM's level 1, and are as fast:
    their time goes into matrix products, which are library calls.
    """
    own: dict[str, str | int | bool] = dict(DETERMINISTIC) if deterministic else {}
    platforms = {device.platform for device in array.sharding.device_set}
    if reads and platforms == {"gpu"}:
        return {**own, **LAUNCHED_ONE_BY_ONE}
    # With this setting JAX asks for less than level 1.
    if platforms != {"cpu"} or jax.config.read("jax_disable_most_optimizations"):
        return own
    return own | {"xla_backend_optimization_level": 1}
