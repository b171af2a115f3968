"""What chosen experts of 4 or 8 bits make of rows, in plain jnp."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.activations import Gating, units_of
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.products import einsum_f32


def packed_expert_product_reference(
    x: Array,  # [N, H]
    experts: Array,  # int32 [N, k]
    gate_up: PackedExperts,
    down: PackedExperts,
    bias: Array | None = None,  # [E, 2, F]
    *,
    clamp: Gating | None,
) -> Array:
    """See pallas_kernels.packed_expert_product.packed_expert_product. Float32 [N, k, H].

    Weights are gathered, and widened in float32; then they are rounded to x's dtype.
    """
    clipped = jnp.minimum(experts, gate_up.num_experts - 1)
    repeated = jnp.broadcast_to(x[:, None], (*experts.shape, x.shape[-1]))
    sums = einsum_f32("nkh,nktfh->nktf", repeated, gate_up.of(clipped).astype(x.dtype))
    if bias is not None:
        sums = sums + bias[clipped].astype(jnp.float32)
    units = units_of(sums[..., 0, :], sums[..., 1, :], clamp, jax.nn.sigmoid).astype(x.dtype)
    [mixed] = jnp.unstack(
        einsum_f32("nkf,nkthf->nkth", units, down.of(clipped).astype(x.dtype)), axis=2
    )
    return mixed
