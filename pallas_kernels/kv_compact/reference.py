"""The specification of kv_compact in jnp; it runs where the kernel does not."""

from collections.abc import Sequence

from jax import Array

from pallas_kernels.rope_kv_write.reference import write_rows


def kv_compact_reference(
    pages: Sequence[Array], source: Array, destination: Array
) -> tuple[Array, ...]:
    """See pallas_kernels.kv_compact.kv_compact."""

    def moved(one: Array) -> Array:
        page_size = one.shape[2]
        page, offset = source // page_size, source % page_size
        rows = one.at[page, :, offset].get(mode="promise_in_bounds")  # [B, A, G, D]
        return write_rows(one, rows, destination)

    return tuple(moved(one) for one in pages)
