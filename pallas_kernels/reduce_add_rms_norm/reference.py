"""The specification of reduce_add_rms_norm in jnp; it runs where the kernel does not."""

from jax import Array, lax

from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.products import sum_partials, total_f32


def reduce_add_rms_norm_reference(
    x: Array, partials: Array, weight: Array, eps: float, axis: str
) -> tuple[Array, Array]:
    """See pallas_kernels.reduce_add_rms_norm.reduce_add_rms_norm."""
    product = sum_partials(partials, len(x), x.dtype)
    total = x + total_f32(list(lax.all_gather(product, axis))).astype(x.dtype)
    return total, rms_norm(total, weight, eps)
