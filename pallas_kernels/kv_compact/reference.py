"""The specification of kv_compact in jnp; it runs where the kernel does not."""

from collections.abc import Sequence

from jax import Array

from pallas_kernels.rope_kv_write.reference import read_rows, write_rows


def kv_compact_reference(
    pages: Sequence[Array], source: Array, destination: Array
) -> tuple[Array, ...]:
    """See pallas_kernels.kv_compact.kv_compact."""

    def moved(array: Array) -> Array:
        return write_rows(array, read_rows(array, source), destination)

    return tuple(moved(array) for array in pages)
