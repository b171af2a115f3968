"""Threads that widen 8-bit floats in shared memory: their arithmetic, on numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.widening import CHUNK, TILE_COLUMNS, chunk_places
from pallas_kernels.shared_memory import LINE, TILE_ROWS

BANKS = LINE // CHUNK  # chunks of different banks
AT_ONCE = 8  # threads of a warp that access memory at once, 16 bytes each

sizes = pytest.mark.parametrize(("num_rows", "width"), [(64, 128), (128, 128), (64, 64), (64, 256)])


def places(num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the 128 threads load [turns, 128] and store [2, turns, 128], in bytes."""
    loads, stores = zip(*chunk_places(np.arange(128), num_rows, width), strict=True)
    return np.stack(loads), np.stack(stores, axis=1)


def swizzled(rows: np.ndarray, columns: int) -> np.ndarray:
    """The memory of rows [n, D] in tiles of 8 rows and ``columns``, as the copy engine writes it:
    it permutes the chunks of a line by the index of the line among eight."""
    n, width = rows.shape
    tiles = rows.reshape(n // TILE_ROWS, TILE_ROWS, width // columns, columns).swapaxes(1, 2)
    plain = np.ascontiguousarray(tiles).reshape(-1).view(np.uint8)
    address = np.arange(plain.size)
    line = columns * rows.itemsize
    memory = np.zeros_like(plain)
    memory[address ^ (address >> 7 & line // CHUNK - 1) << 4] = plain
    return memory


@sizes
def test_each_chunk_becomes_the_two_that_tensor_cores_read(num_rows: int, width: int):
    rng = np.random.default_rng(0)
    narrow = rng.standard_normal((num_rows, width)).astype(jnp.float8_e4m3fn)
    wide = narrow.astype(jnp.bfloat16)
    loads, stores = places(num_rows, width)
    chunks = swizzled(narrow, min(width, LINE)).reshape(-1, CHUNK)[loads // CHUNK]
    widened = chunks.view(jnp.float8_e4m3fn).astype(jnp.bfloat16)  # [turns, 128, CHUNK]
    found = np.zeros((num_rows * width // 8, 8), jnp.bfloat16)
    for half, place in enumerate(stores):
        found[place // CHUNK] = widened[..., 8 * half : 8 * half + 8]
    assert sorted(stores.reshape(-1)) == list(range(0, 2 * num_rows * width, CHUNK))
    assert np.array_equal(found.reshape(-1).view(np.uint8), swizzled(wide, TILE_COLUMNS))


@sizes
def test_threads_that_access_memory_at_once_share_no_bank(num_rows: int, width: int):
    for addresses in (*places(num_rows, width)[:1], *places(num_rows, width)[1]):
        banks = addresses.reshape(-1, AT_ONCE) // CHUNK % BANKS
        assert all(len(set(own)) == AT_ONCE for own in banks)
