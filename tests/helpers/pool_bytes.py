"""The bytes of cache memory, as an engine estimates them."""

from jaxspec.decoding.functional import EngineParams, init_pool
from jaxspec.engine.memory import _bytes


def pool_bytes(
    params: EngineParams, num_pages: int, page_size: int, num_rows: int, *, together: bool
) -> int:
    """Bytes of a pool on each device, or (``together``) on all devices of the mesh."""
    return _bytes(
        lambda: init_pool(params, num_pages, page_size, num_rows),
        params.layout,
        params.mesh,
        together=together,
    )
