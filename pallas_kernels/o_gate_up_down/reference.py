"""The specification of o_gate_up_down in jnp; it runs where the kernel does not."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.o_gate_up_down.weights import LayerWeights, PackedWeights
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.round_tokens import round_tokens


def o_gate_up_down_reference(
    x: Array,
    residual: Array,
    weights: LayerWeights,
    eps: float,
) -> tuple[Array, Array]:
    """See pallas_kernels.o_gate_up_down.o_gate_up_down."""
    [projected] = _product(x, weights.o, x.dtype)
    total = residual + projected
    [both] = _product(rms_norm(total, weights.norm, eps), weights.gate_up, x.dtype)
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    units = (jax.nn.silu(gate) * up).astype(x.dtype)
    return total, _product(units, weights.down, jnp.dtype("float32"))


def _product(x: Array, weights: PackedWeights, dtype: jnp.dtype) -> Array:
    """[1, M, V]; rows are rounded to 8-bit floats where weights are such."""
    x_scale = None
    if weights.values.dtype == FLOAT8:
        x, x_scale = round_tokens(x, len(weights.scale))
    return packed_product_reference(x, *weights, x_scale, num_splits=1, dtype=dtype)
