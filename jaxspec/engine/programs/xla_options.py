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

# XLA's own all-reduces run outside of CUDA graphs, so that a round falls into many graphs; NCCL's
# can be nodes of one. On two H200s that took a token of an 8B model from 3.44 to 3.15 ms.
ONE_GRAPH: Mapping[str, str] = MappingProxyType(
    {
        "xla_gpu_experimental_use_collective_kernels": "",
        # XLA's default and collectives. An option of a program replaces the list; unlike a flag, it
        # cannot add to it.
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
        ),
    }
)


# A program that reads prompts has hundreds of kernels, most of them longer than their launch. As a
# CUDA graph they would start only when the graph has been updated to this call's buffers.
LAUNCHED_ONE_BY_ONE: Mapping[str, str] = MappingProxyType({"xla_gpu_enable_command_buffer": ""})

# A pipeline's passage has several arrays side by side. XLA hands kernels parts of it as they lie
# there, and Mosaic kernels refuse what does not begin at a multiple of 256 bytes.
WHOLE_ARRAYS: Mapping[str, bool] = MappingProxyType({"xla_gpu_enable_dynamic_slice_fusion": False})


def compiler_options(
    array: jax.Array, *, deterministic: bool, reads: bool = False
) -> dict[str, str | int | bool]:
    """XLA's options for programs that run where an array is, as jax.jit takes them.

    Args:
      deterministic: for a fixed verify width, which deterministic mode always has: XLA keeps every
        rounding and times no kernels.
      reads: whether they read prompts. Others over several GPUs get ONE_GRAPH.

    A CPU's programs are compiled in three quarters of the time at LLVM's level 1, and are as fast:
    their time goes into matrix products, which are library calls.
    """
    chosen: dict[str, str | int | bool] = dict(DETERMINISTIC) if deterministic else {}
    devices = array.sharding.device_set
    platforms = {device.platform for device in devices}
    if platforms == {"gpu"}:
        if reads:
            chosen |= LAUNCHED_ONE_BY_ONE
        elif len(devices) > 1:
            chosen |= ONE_GRAPH
    # With this setting JAX asks for less than level 1.
    if platforms != {"cpu"} or jax.config.read("jax_disable_most_optimizations"):
        return chosen
    return chosen | {"xla_backend_optimization_level": 1}


def passage_options(array: jax.Array) -> dict[str, bool]:
    """More options for programs that take a pipeline's passage where an array is."""
    on_gpu = {device.platform for device in array.sharding.device_set} == {"gpu"}
    return dict(WHOLE_ARRAYS) if on_gpu else {}
