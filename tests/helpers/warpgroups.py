"""What inlined MLIR of a warpgroup computes, on numbers: its operations, by NumPy for all of 128
threads at a time.

``emulated`` puts these in the place of the modules with which a file of pallas_kernels writes MLIR.
Threads are in step, so what waits for other threads does nothing. Values are arrays [128] or, of
vectors, [128, n]; arrays in device memory are NumPy's, those in shared memory are a part of
``SHARED``.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir.dialects import arith as real_arith

THREADS, WARPS, LANES = 128, 4, 32
SHARED = np.zeros(1 << 18, np.uint8)
BF16 = np.dtype(jnp.bfloat16)
_I32, _F32, _I16, _I8 = np.dtype("u4"), np.dtype("f4"), np.dtype("u2"), np.dtype("u1")
_masks = [np.ones(THREADS, bool)]  # of the threads that run, by nested conditions


class Pointer:
    """Addresses of all threads: bytes from the start of a buffer."""

    def __init__(self, buffer: np.ndarray, offsets: Any):
        self.buffer, self.offsets = buffer, np.broadcast_to(np.asarray(offsets, np.int64), THREADS)


class Ref:
    """An array in memory, as kernels see it."""

    def __init__(self, array: np.ndarray, start: int | None = None):
        self.type, self.array = types.SimpleNamespace(shape=array.shape, dtype=array.dtype), array
        buffer = array.reshape(-1).view(np.uint8) if start is None else SHARED
        self.pointer = Pointer(buffer, start or 0)


def shared(start: int, shape: tuple[int, ...], dtype: Any) -> Ref:
    """An array in shared memory, from a byte on."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return Ref(SHARED[start : start + size].view(dtype).reshape(shape), start)


def number(value: int) -> Any:
    """What kernels get for a number that all threads know."""
    words = np.full(THREADS, value, _I32)
    return types.SimpleNamespace(registers=types.SimpleNamespace(item=lambda: words))


def _per_element(pointer: Pointer, size: int, width: int) -> np.ndarray:
    return pointer.offsets[:, None] + np.arange(size * width)


def _load(kind: Any, pointer: Pointer, alignment: int = 1) -> np.ndarray:
    dtype, size = kind if isinstance(kind, tuple) else (kind, 1)
    assert (pointer.offsets[_masks[-1]] % alignment == 0).all(), "an address that is not aligned"
    places = np.where(_masks[-1][:, None], _per_element(pointer, size, dtype.itemsize), 0)
    found = np.ascontiguousarray(pointer.buffer[places]).view(dtype)
    return found if isinstance(kind, tuple) else found[:, 0]


def _store(value: np.ndarray, pointer: Pointer, alignment: int = 1) -> None:
    assert (pointer.offsets[_masks[-1]] % alignment == 0).all(), "an address that is not aligned"
    places = _per_element(pointer, 1, value.dtype.itemsize)
    data = np.ascontiguousarray(value).view(np.uint8).reshape(THREADS, -1)
    pointer.buffer[places[_masks[-1]]] = data[_masks[-1]]


def _compare(predicate: Any, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    names = real_arith.CmpIPredicate
    return {names.eq: left == right, names.ne: left != right, names.ult: left < right}[predicate]


@contextlib.contextmanager
def _when(condition: np.ndarray) -> Iterator[None]:
    _masks.append(_masks[-1] & condition)
    yield
    _masks.pop()


def _select(condition: np.ndarray, left: Any, right: Any) -> Any:
    if not isinstance(left, Pointer):
        return np.where(condition, left, right)
    buffer = np.concatenate([left.buffer, right.buffer])
    return Pointer(buffer, np.where(condition, left.offsets, right.offsets + len(left.buffer)))


def _by_warp(values: np.ndarray) -> np.ndarray:
    return values.reshape(WARPS, LANES)


def _of_warps(values: np.ndarray) -> np.ndarray:
    return np.repeat(values, LANES)


def _ptx(text: str, *arguments: Any, **how: Any) -> Any:
    """The instructions that these kernels inline."""
    first = arguments[0]
    match text.split(".")[0].strip("{ "):
        case "ex2":
            return np.exp2(first)
        case "popc":
            return np.array([int(word).bit_count() for word in first], _I32)
        case "":  # a predicate's register, and a vote
            bits = _by_warp(first != 0).astype(np.uint64) << np.arange(LANES, dtype=np.uint64)
            return _of_warps(bits.sum(1).astype(_I32))
        case "shfl":  # of a lane of every four
            of_quad = int(text.split(",")[2])
            return np.repeat(first.reshape(-1, 4)[:, of_quad], 4)
        case "ld":  # of a byte
            return _load(_I8, first).astype(how["result_types"])
        case "redux":
            best = np.max if ".max." in text else np.min
            return _of_warps(best(_by_warp(first), axis=1))
        case "ldmatrix":
            rows = SHARED[first[:, None].astype(int) + np.arange(16)].view(_I32)
            rows = rows.reshape(WARPS, 4, 8, 4)  # of warps' matrices
            lane = np.arange(LANES)
            return [rows[:, at, lane // 4, lane % 4].reshape(-1) for at in range(4)]
        case "cp":  # each thread some bytes, waited for by nobody
            return _copy(*arguments, size=int(text.rstrip(";").split(",")[-1]))
        case "mma":
            return _mma(arguments[:4], arguments[4:6], arguments[6:])
    raise NotImplementedError(text)


def _copy(to: Pointer, source: Pointer, *, size: int) -> None:
    for pointer in (to, source):
        assert (pointer.offsets[_masks[-1]] % size == 0).all(), "an address that is not aligned"
    places = [_per_element(pointer, 1, size)[_masks[-1]] for pointer in (to, source)]
    to.buffer[places[0]] = source.buffer[places[1]]


def _mma(first: Any, second: Any, sums: Any) -> list[np.ndarray]:
    """mma.m16n8k16, by the fragments of PTX's manual."""
    lane = np.arange(LANES)
    row, pair = lane // 4, 2 * (lane % 4)[:, None] + np.arange(2)
    a, b, c = np.zeros((WARPS, 16, 16)), np.zeros((WARPS, 16, 8)), np.zeros((WARPS, 16, 8))
    for at, words in enumerate(first):
        entries = words.view(BF16).reshape(WARPS, LANES, 2).astype(float)
        a[:, (row + at % 2 * 8)[:, None], pair + at // 2 * 8] = entries
    for at, words in enumerate(second):
        b[:, pair + at * 8, row[:, None]] = words.view(BF16).reshape(WARPS, LANES, 2).astype(float)
    places = [(row + half * 8, 2 * (lane % 4) + e) for half in range(2) for e in range(2)]
    for place, values in zip(places, sums, strict=True):
        c[:, place[0], place[1]] = _by_warp(values)
    c = (c + a @ b).astype(_F32)
    return [c[:, place[0], place[1]].reshape(-1) for place in places]


def _divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return left / right


def _float_operation(function: Any) -> Any:
    def apply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(left, right).astype(left.dtype)

    return apply


arith = types.SimpleNamespace(
    CmpIPredicate=real_arith.CmpIPredicate,
    cmpi=_compare,
    select=_select,
    addi=lambda left, right: left + right,
    subi=lambda left, right: left - right,
    muli=lambda left, right: left * right,
    divui=lambda left, right: left // right,
    remui=lambda left, right: left % right,
    shli=lambda left, right: left << right,
    shrui=lambda left, right: left >> right,
    andi=lambda left, right: left & right,
    ori=lambda left, right: left | right,
    xori=lambda left, right: left ^ right,
    minui=np.minimum,
    maxui=np.maximum,
    addf=_float_operation(np.add),
    subf=_float_operation(np.subtract),
    mulf=_float_operation(np.multiply),
    divf=_float_operation(np.divide),
    extui=lambda kind, value: value.astype(kind),
    extf=lambda kind, value: value.astype(kind[0] if isinstance(kind, tuple) else kind),
    truncf=lambda kind, value: value.astype(kind[0] if isinstance(kind, tuple) else kind),
)
llvm = types.SimpleNamespace(
    load=_load,
    store=_store,
    ptrtoint=lambda kind, pointer: pointer.offsets.astype(_I32),
)
vector = types.SimpleNamespace(
    extract=lambda values, dynamic, static: np.ascontiguousarray(values[:, static[0]]),
    from_elements=lambda kind, values: np.stack(values, 1),
)
ir = types.SimpleNamespace(
    IntegerType=types.SimpleNamespace(get_signless=lambda bits: {32: _I32, 16: _I16, 8: _I8}[bits]),
    F32Type=types.SimpleNamespace(get=lambda: _F32),
    BF16Type=types.SimpleNamespace(get=lambda: BF16),
    VectorType=types.SimpleNamespace(get=lambda shape, kind: (kind, *shape)),
    MemRefType=lambda kind: types.SimpleNamespace(shape=kind.shape, element_type=kind.dtype),
)


def _bitcast(value: np.ndarray, kind: Any) -> np.ndarray:
    dtype = kind[0] if isinstance(kind, tuple) else kind
    cast = np.ascontiguousarray(value).reshape(THREADS, -1).view(dtype)
    return cast if isinstance(kind, tuple) else cast[:, 0]


class Warpgroup:
    """The modules of a warpgroup of a thread block, for ``emulated``."""

    def __init__(self, index: int = 0):
        thread = np.arange(THREADS, dtype=_I32)
        self.utils = types.SimpleNamespace(
            c=lambda value, kind: np.full(THREADS, value, kind),
            memref_ptr=lambda ref: ref.pointer,
            getelementptr=lambda pointer, places, kind: Pointer(
                pointer.buffer, pointer.offsets + places[0].astype(np.int32) * kind.itemsize
            ),
            bitcast=_bitcast,
            inline_ptx=_ptx,
            shfl_bfly=lambda value, distance: value[thread ^ distance],
            warp_idx=lambda sync: thread // LANES + WARPS * index,
        )
        self.mgpu = types.SimpleNamespace(
            thread_idx=lambda: thread + THREADS * index,
            when=_when,
            WGMMA_LAYOUT=types.SimpleNamespace(registers_shape=lambda shape: 2),
            FragmentedArray=lambda _registers, _layout, _is_signed: _registers,
        )


def emulated(monkeypatch: pytest.MonkeyPatch, modules: Any, warpgroup: Warpgroup) -> None:
    """Let files' functions that write MLIR run on numbers."""
    named = {"arith": arith, "llvm": llvm, "vector": vector, "ir": ir}
    named |= {"utils": warpgroup.utils, "mgpu": warpgroup.mgpu, "gather": lambda: None}
    for module in modules:
        for name, replacement in named.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, replacement)
