"""Unsigned integers of a few bits, packed into 32-bit words: those at the low end come first."""

import numpy as np

WORD = 32
Order = tuple[int, ...]


def per_word(bits: int) -> int:
    """Integers in a word."""
    return WORD // bits


def pack(values: np.ndarray, bits: int, axis: int, order: Order | None = None) -> np.ndarray:
    """Pack integers from 0 to 2^bits - 1 along one axis of a matrix: int32, that axis shorter.

    ``order``: which of the integers of a word's span each field has, from the low end; None: in
    turn. A last word that is not full has zeros at its high end.
    """
    count = per_word(bits)
    fields = np.moveaxis(np.asarray(values), axis, -1)
    missing = -fields.shape[-1] % count
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, missing)])
    fields = fields.reshape(*fields.shape[:-1], -1, count).astype(np.uint32)
    words = np.zeros(fields.shape[:-1], np.uint32)
    for field, source in enumerate(order or range(count)):
        words |= fields[..., source] << np.uint32(bits * field)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def unpack(words: np.ndarray, bits: int, axis: int, order: Order | None = None) -> np.ndarray:
    """The reverse of ``pack``: uint8, the axis longer. Padding of the last word is kept."""
    count = per_word(bits)
    packed = np.moveaxis(np.asarray(words), axis, -1).view(np.uint32)
    fields = np.empty((*packed.shape, count), np.uint8)
    for field, source in enumerate(order or range(count)):
        fields[..., source] = (packed >> np.uint32(bits * field)) & np.uint32(2**bits - 1)
    return np.moveaxis(fields.reshape(*packed.shape[:-1], -1), -1, axis)
