"""How the quantizer's programs are compiled: ``@program`` in place of ``@jax.jit``."""

import functools

import jax

program = functools.partial(
    jax.jit,
    compiler_options={
        # A scale that is rounded to float16, or a norm to bfloat16, is meant to be rounded, though
        # float32 comes next.
        "xla_allow_excess_precision": False,
        # A process meets about thirty shapes of float32 products. For each, XLA would compile 16
        # kernels of its own and time them beside cuBLAS.
        "xla_gpu_enable_triton_gemm": False,
    },
)
