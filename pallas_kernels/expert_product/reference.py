"""What chosen experts make of rows, in plain jnp."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.activations import Gating, units_of
from pallas_kernels.products import einsum_f32


def expert_product_reference(
    x: Array,  # [N, H]
    experts: Array,  # int32 [N, k]
    gate_up: Array,  # [E, H, 2, F]
    down: Array,  # [E, F, H]
    bias: Array | None = None,  # [E, 2, F]
    *,
    clamp: Gating | None,
) -> Array:
    """See pallas_kernels.expert_product.expert_product. Float32 [N, k, H].

    Reads the weights of the chosen experts for few rows, else those of all.
    """
    if experts.size <= len(gate_up):
        return _of_gathered(x, experts, gate_up, down, bias, clamp)
    # A batch of products: of one with all experts' outputs XLA would transpose the weights first.
    sums = einsum_f32("enh,ehtf->netf", jnp.broadcast_to(x, (len(gate_up), *x.shape)), gate_up)
    units = _units(sums, bias, x.dtype, clamp)
    every = einsum_f32("nef,efh->neh", units, down)
    return jnp.take_along_axis(every, experts[..., None], axis=1, mode="clip")


def _of_gathered(
    x: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    bias: Array | None,
    clamp: Gating | None,
) -> Array:
    clipped = jnp.minimum(experts, len(gate_up) - 1)
    repeated = jnp.broadcast_to(x[:, None], (*experts.shape, x.shape[-1]))
    sums = einsum_f32("nkh,nkhtf->nktf", repeated, gate_up[clipped])
    units = _units(sums, None if bias is None else bias[clipped], x.dtype, clamp)
    return einsum_f32("nkf,nkfh->nkh", units, down[clipped])


def _units(sums: Array, bias: Array | None, dtype: jnp.dtype, clamp: Gating | None) -> Array:
    """[..., 2, F] -> [..., F]"""
    with_bias = sums if bias is None else sums + bias.astype(jnp.float32)
    return units_of(with_bias[..., 0, :], with_bias[..., 1, :], clamp, jax.nn.sigmoid).astype(dtype)
