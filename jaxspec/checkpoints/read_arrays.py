"""Reads the arrays of a tree from the tensors of a checkpoint, several at a time.

A shard of an array is read from the file slices that it consists of, a few megabytes at a time.
Each slice is cast and transposed as it is read, which takes longer than the file and the devices:
so threads do it side by side. The host holds at most READ_AHEAD bytes of arrays, or one array that
is larger, and a slice for each thread.
"""

import contextlib
import functools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import Array
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding

from jaxspec.models.tensors import CheckpointTensor, Piece, Split
from jaxspec.parallel.memory_format import put_weight

READERS = 8  # threads, at most
READ_AHEAD = 2 << 30  # bytes of arrays on the host
CHUNK_ELEMENTS = 4 << 20  # most elements read at a time
STRIP = 128  # columns copied at a time: transposing whole matrices is several times slower


def read_side_by_side(
    stored: Mapping[str, CheckpointTensor], wanted: Iterable[tuple[Any, Any, Any]]
) -> Iterator[Any]:
    """Trees of arrays on their devices, in order, of (shapes, splits, places) each.

    An error ends it as soon as the arrays under way are read.
    """
    held, device = HeldBytes(READ_AHEAD), jax.config.jax_default_device  # of this thread

    def load(shape: jax.ShapeDtypeStruct, split: Split, place: Sharding | Format) -> Array:
        size = math.prod(shape.shape) * shape.dtype.itemsize
        with held.while_reading(size), jax.default_device(device):
            return _load_array(stored, shape, split, place)

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "jaxspec-read") as pool:
        yield from pool.map(lambda node: jax.tree.map(load, *node), wanted)


class HeldBytes:
    """Bounds the bytes that threads hold together; more than that are held by a thread alone."""

    def __init__(self, most: int):
        self._most, self._used, self._freed = most, 0, threading.Condition()

    @contextlib.contextmanager
    def while_reading(self, size: int) -> Iterator[None]:
        with self._freed:
            self._freed.wait_for(lambda: not self._used or self._used + size <= self._most)
            self._used += size
        try:
            yield
        finally:
            with self._freed:
                self._used -= size
                self._freed.notify_all()


def _load_array(
    stored: Mapping[str, CheckpointTensor],
    shape: jax.ShapeDtypeStruct,
    split: Split,
    place: Sharding | Format,
) -> Array:
    @functools.cache  # replicas of a block are read once
    def read_block(*bounds: tuple[int, int]) -> np.ndarray:
        block = np.zeros([stop - start for start, stop in bounds], shape.dtype)
        for piece in split(block, tuple(start for start, _ in bounds)):
            _read_piece(stored[piece.name], piece)
        return block

    def block_at(index: tuple[slice, ...] | None) -> np.ndarray:
        sizes = zip(index or (), shape.shape, strict=True)
        return read_block(*(part.indices(size)[:2] for part, size in sizes))

    if isinstance(place, SingleDeviceSharding):
        array = put_weight(read_block(*((0, size) for size in shape.shape)), place)
    else:
        array = jax.make_array_from_callback(shape.shape, place, block_at)
    return jax.block_until_ready(array)  # bounds host memory: copies to the device are asynchronous


def _read_piece(tensor: CheckpointTensor, piece: Piece) -> None:
    """Fill a piece's view in chunks of its leading axis."""
    step = max(1, CHUNK_ELEMENTS // math.prod(piece.view.shape[1:]))
    size = math.prod(piece.row_shape[1:])  # rows for each index of the leading axis
    for first in range(0, len(piece.view), step):
        part = piece.view[first : first + step]
        row = piece.row + first * size
        rows = tensor.read(*piece.of_tensor(slice(row, row + len(part) * size)))
        check_numbers(tensor, rows)
        rows = rows.T if piece.inputs_first else rows
        if piece.offset:
            rows = rows.astype(np.float32) + piece.offset
        if piece.factor != 1:
            rows = rows.astype(np.float32) * np.float32(piece.factor)
        check_narrow(tensor, rows, part.dtype)
        copy_in_strips(part, rows.astype(part.dtype, copy=False).reshape(part.shape))


# Floats that are wide enough for an infinity: as integers, their largest numbers are below it.
WIDE = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))


def check_numbers(tensor: CheckpointTensor, rows: np.ndarray) -> None:
    """Raise ValueError for rows of a tensor that hold NaN or an infinity.

    Floats are read as integers, where these are the largest of either sign: their maximum takes a
    fraction of the time that a look at each of them takes, and no memory.
    """
    if rows.dtype not in WIDE or not rows.size:
        return
    infinity = np.array(np.inf, rows.dtype)
    for kind, bound in ((f"i{rows.itemsize}", infinity), (f"u{rows.itemsize}", -infinity)):
        if rows.view(kind).max() >= bound.view(kind):
            raise ValueError(f"{tensor.file}: {tensor.name} holds NaN or an infinity")


def check_narrow(tensor: CheckpointTensor, rows: np.ndarray, dtype: np.dtype) -> None:
    """Raise ValueError for integers that a narrower dtype would wrap."""
    if rows.dtype.kind != "i" or dtype.kind != "i" or rows.dtype.itemsize <= dtype.itemsize:
        return
    bounds = np.iinfo(dtype)
    wrong = rows[(rows < bounds.min) | (rows > bounds.max)]
    if wrong.size:
        raise ValueError(f"{tensor.file}: {tensor.name} holds {wrong[0]}, which {dtype} has not")


def copy_in_strips(destination: np.ndarray, source: np.ndarray) -> None:
    """Copy in strips of columns, as one of the two arrays is usually transposed."""
    if source.ndim > 2:
        for part, rows in zip(destination, source, strict=True):
            copy_in_strips(part, rows)
        return
    if source.ndim == 2 and destination.strides[0] < destination.strides[1]:
        destination, source = destination.T, source.T
    for first in range(0, source.shape[-1], STRIP):
        strip = (..., slice(first, first + STRIP))
        destination[strip] = source[strip]
