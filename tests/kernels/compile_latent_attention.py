"""Compiles latent attention for an H100, in a process of its own: see test_latent_attention.py."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxspec.evaluation.benchmarks.ahead_of_time import compile_ahead, make_devices
from pallas_kernels.latent_attention.cases import COMPILED_CASES, make_arguments
from pallas_kernels.latent_attention.mosaic_gpu import latent_attention_mosaic


def main() -> None:
    sharding = SingleDeviceSharding(make_devices(1)[0])
    for case in COMPILED_CASES:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(functools.partial(make_arguments, case, jnp.bfloat16)),
        )
        compile_ahead(jax.jit(functools.partial(latent_attention_mosaic, **case.options)), shapes)


if __name__ == "__main__":
    main()
