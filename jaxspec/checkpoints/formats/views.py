"""Tensors that are computed from a checkpoint's others while they are read, and checks of these."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxspec.checkpoints.formats.packing import per_word, unpack
from jaxspec.config.checks import Problems
from jaxspec.models.tensors import CheckpointTensor

Tensors = Mapping[str, CheckpointTensor]
Bounds = tuple[int, int]  # start and stop
FLOAT_SCALES = ("F16", "BF16", "F32")
OF_EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of a module
MOST_PROBLEMS = 8  # most modules that an error names
# Ends of names of parts, of which most modules have one.
USUAL = (".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight", ".scales")
INPUTS_FIRST = ("qweight", "qzeros", "scales")  # parts of AWQ's and GPTQ's modules


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor computed from one that is stored: the same file, and its name in errors.

    Attributes:
      compute: from the bounds of each dimension to the values there.
    """

    stored: CheckpointTensor
    shape: tuple[int, ...]
    dtype: str
    compute: Callable[..., np.ndarray]

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def name(self) -> str:
        return self.stored.name

    def read(self, *index: slice) -> np.ndarray:
        index = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        bounds = (part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True))
        return self.compute(*bounds)


def packed_integers(
    words: CheckpointTensor,
    bits: int,
    axis: int,
    *,
    inputs_first: bool,
    size: int | None = None,
    order: tuple[int, ...] | None = None,
    add: int = 0,
) -> View:
    """Signed integers [out, in] of a stored matrix of words.

    Args:
      axis: of the stored matrix, along which words hold several integers.
      inputs_first: it is stored as [in, out].
      size: integers along that axis, if the last word is not full.
      order: see packing.unpack.
      add: is added to the stored integers, modulo 2^bits.
    """
    count, half = per_word(bits), 2 ** (bits - 1)
    sizes = list(words.shape)
    sizes[axis] = sizes[axis] * count if size is None else size

    def compute(*bounds: Bounds) -> np.ndarray:
        stored = bounds[::-1] if inputs_first else bounds
        start, stop = stored[axis]
        index = [slice(*each) for each in stored]
        index[axis] = slice(start // count, -(-stop // count))
        fields = unpack(words.read(*index), bits, axis, order)
        skipped = start // count * count
        index = [slice(None)] * 2
        index[axis] = slice(start - skipped, stop - skipped)
        shifted = (fields[tuple(index)].astype(np.int16) + add) % 2**bits - half
        values = shifted.astype(np.int8)
        return values.T if inputs_first else values

    shape = tuple(sizes[::-1] if inputs_first else sizes)
    return View(words, shape, "I4" if bits == 4 else "I8", compute)


def zeros_like_scales(zeros: View, scales: CheckpointTensor) -> View:
    """Zeros [out, in / group] as floats of the scales' dtype: they are whole numbers below 2^8."""

    def compute(*bounds: Bounds) -> np.ndarray:
        return zeros.compute(*bounds).astype(np.float32)

    return View(zeros.stored, zeros.shape, scales.dtype, compute)


def as_numbers(scales: CheckpointTensor) -> CheckpointTensor:
    """Scales that are stored as the exponents of powers of two (E8M0), as float32; others as they
    are. The byte 255 is NaN."""
    if scales.dtype not in ("F8_E8M0", "U8"):
        return scales

    def compute(*bounds: Bounds) -> np.ndarray:
        exponents = scales.read(*(slice(*each) for each in bounds)).astype(np.int32)
        powers = np.ldexp(np.float32(1), np.minimum(exponents, 254) - 127)
        return np.where(exponents == 255, np.float32(np.nan), powers)

    return View(scales, scales.shape, "F32", compute)


def checked_scales(scales: CheckpointTensor, *, inputs_first: bool, repeats: int = 1) -> View:
    """Scales [out, in / group] of a stored matrix.

    Args:
      inputs_first: it is stored as [in / group, out].
      repeats: outputs that share a scale; each has its own in the result.

    Reading raises ValueError for scales that are not above 0.
    """
    if scales.dtype not in FLOAT_SCALES:
        raise ValueError(f"{scales.name} has dtype {scales.dtype}: scales are F16, BF16 or F32")
    shape = scales.shape[::-1] if inputs_first else scales.shape

    def compute(rows: Bounds, columns: Bounds) -> np.ndarray:
        first, last = rows[0] // repeats, -(-rows[1] // repeats)
        index = (slice(first, last), slice(*columns))
        values = scales.read(*index[::-1]).T if inputs_first else scales.read(*index)
        widened = values.astype(np.float32)
        if not (np.isfinite(widened).all() and (widened > 0).all()):
            row, column = np.argwhere(~(np.isfinite(widened) & (widened > 0)))[0]
            raise ValueError(
                f"{scales.file}: {scales.name} has the scale {widened[row, column]} for output "
                f"{(first + row) * repeats}, group {columns[0] + column}: scales must be above 0"
            )
        start = rows[0] - first * repeats
        return np.repeat(values, repeats, axis=0)[start : start + rows[1] - rows[0]]

    return View(scales, (shape[0] * repeats, shape[1]), scales.dtype, compute)


def checked_values(values: CheckpointTensor) -> View:
    """Floats of 8 bits. Reading raises ValueError for values that are no numbers."""

    def compute(*bounds: Bounds) -> np.ndarray:
        read = values.read(*(slice(*each) for each in bounds))
        if ((read.view(np.uint8) & 0x7F) == 0x7F).any():
            raise ValueError(f"{values.file}: {values.name} has values that are no numbers (NaN)")
        return read

    return View(values, values.shape, values.dtype, compute)


def marker(stored: CheckpointTensor) -> View:
    """A tensor of no elements: that it is there says something of the module of ``stored``."""
    return View(stored, (0,), "I8", lambda bounds: np.zeros(0, np.int8))


def check_words(tensor: CheckpointTensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor is a matrix of int32 words of this shape."""
    if tensor.dtype != "I32" or tensor.shape != shape:
        raise ValueError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, but must be packed as I32 "
            f"{list(shape)}"
        )


def check_shape(tensor: CheckpointTensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if tensor.shape != shape:
        raise ValueError(f"{tensor.name} is {list(tensor.shape)}, but must be {list(shape)}")


def with_modules(
    stored: Tensors,
    suffix: str,
    parts: tuple[str, ...],
    read: Callable[[str], dict[str, CheckpointTensor]],
    others: tuple[str, ...] = (),
) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, of modules that have ``<name>.<suffix>`` what ``read`` makes of
    their ``parts``. ``others``: parts that no other modules have, so ``read`` gets these modules
    too, and says that the rest is missing.

    Raises one ValueError of what is wrong with all modules.
    """
    tensors, problems = dict(stored), Problems()
    names = (name.rpartition(".") for name in stored)
    for module in dict.fromkeys(module for module, _, part in names if part in (suffix, *others)):
        for part in parts:
            tensors.pop(f"{module}.{part}", None)
        with problems.caught():
            tensors |= read(module)
    problems.raise_all(MOST_PROBLEMS)
    return tensors


def inputs_first_module(
    stored: Tensors,
    module: str,
    bits: int,
    group: int | None,
    *,
    axis: int,
    order: tuple[int, ...] | None = None,
    add: int = 0,
) -> dict[str, CheckpointTensor]:
    """A module's values, zero and scale of ``qweight``, ``qzeros`` and ``scales``, which are stored
    as [in, out], with zeros packed along the outputs.

    Args:
      axis: of qweight, along which words hold several integers.
      order: see packing.unpack.
      add: is added to the stored zeros.
    """
    words, zeros, scales = (part_of(stored, module, part) for part in INPUTS_FIRST)
    count = per_word(bits)
    size = words.shape[0] * (count if axis == 0 else 1)
    outputs = words.shape[-1] * (count if axis == 1 else 1)
    groups = check_divides(module, size, group or size)
    check_words(words, (words.shape[0], words.shape[-1]))
    check_words(zeros, (groups, outputs // count))
    check_shape(scales, (groups, outputs))
    zeros_as_stored = packed_integers(zeros, bits, 1, inputs_first=True, order=order, add=add)
    return {
        f"{module}.values": packed_integers(words, bits, axis, inputs_first=True, order=order),
        f"{module}.zero": zeros_like_scales(zeros_as_stored, scales),
        f"{module}.scale": checked_scales(scales, inputs_first=True),
    }


def part_of(stored: Tensors, module: str, suffix: str) -> CheckpointTensor:
    """The tensor of a quantized module. Raises ValueError if there is none."""
    if (tensor := stored.get(f"{module}.{suffix}")) is None:
        name = in_file(stored, module)
        raise ValueError(f"{name} is quantized, but {name}.{suffix} is missing")
    return tensor


def in_file(stored: Tensors, module: str) -> str:
    """What the file calls a module of which it has a tensor at least: names of ``stored`` are those
    of the layers."""
    usual = {name: stored[name] for part in USUAL if (name := f"{module}{part}") in stored}
    for tensors in (usual, stored):  # an error of many modules looks for each: few tensors first
        for name, tensor in tensors.items():
            part = name.removeprefix(module)
            if name.startswith((f"{module}.", f"{module}_")) and tensor.name.endswith(part):
                return tensor.name.removesuffix(part)
    return module


def modules_in_files(stored: Tensors) -> dict[str, str]:
    """What files call modules, by the names of the layers."""
    ends = ((name, f".{name.rpartition('.')[2]}", tensor.name) for name, tensor in stored.items())
    return {
        name.removesuffix(end): file_name.removesuffix(end)
        for name, end, file_name in ends
        if file_name.endswith(end)
    }


def check_divides(module: str, size: int, group: int) -> int:
    """The number of groups of inputs. Raises ValueError if they are not of one size."""
    if size % group:
        raise ValueError(f"group_size {group} does not divide the {size} inputs of {module}")
    return size // group
