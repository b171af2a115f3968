"""The specification of o_gate_up_down in jnp; it runs where the kernel does not."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.o_gate_up_down.weights import LayerWeights
from pallas_kernels.packed_product.reference import packed_product_reference


def o_gate_up_down_reference(
    x: Array,
    residual: Array,
    weights: LayerWeights,
    eps: float,
) -> tuple[Array, Array]:
    """See pallas_kernels.o_gate_up_down.o_gate_up_down."""
    product = functools.partial(packed_product_reference, num_splits=1)
    [projected] = product(x, *weights.o, dtype=x.dtype)
    total = residual + projected
    [both] = product(rms_norm(total, weights.norm, eps), *weights.gate_up, dtype=x.dtype)
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    units = (jax.nn.silu(gate) * up).astype(x.dtype)
    return total, product(units, *weights.down, dtype=jnp.dtype("float32"))
