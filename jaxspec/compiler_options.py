"""Options of XLA for the engine's programs."""

import jax


def compiler_options(array: jax.Array) -> dict[str, str | int | bool]:
    """For programs that run where an array is, as jax.jit takes them.

    A CPU's programs are compiled in three quarters of the time at LLVM's level 1, and are as fast:
    their time goes into matrix products, which are library calls.
    """
    # With this setting JAX asks for less than level 1.
    platforms = {device.platform for device in array.sharding.device_set}
    if platforms != {"cpu"} or jax.config.read("jax_disable_most_optimizations"):
        return {}
    return {"xla_backend_optimization_level": 1}
