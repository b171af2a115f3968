"""Modules of 4-bit numbers, two in a byte: floats (E2M1), and the integers of experts.

The low half of a byte is the even input's. Floats have a scale for groups of 32 inputs, whose byte
is an exponent (MXFP4: 2^(byte - 127)), or for groups of 16, in e4m3, with a number for the whole
tensor beside them (NVFP4). They stay as they are stored; widened.py says which do not.
"""

from collections.abc import Callable

import numpy as np

from jaxspec.checkpoints.formats.views import (
    FLOAT_SCALES,
    OF_EXPERT,
    Bounds,
    Tensors,
    View,
    check_shape,
)
from jaxspec.models.tensors import CheckpointTensor

E4M3 = "F8_E4M3"
GROUPS = {"U8": 32, "F8_E8M0": 32, E4M3: 16}  # inputs of a group, by the dtype of its scale
MOST_EXPONENT = 252  # 6 * 2^(252 - 127) is the largest number that float32 has; 255 is no number


def float4_module(
    module: str,
    codes: CheckpointTensor,
    scale: CheckpointTensor,
    factor: View | None = None,
) -> dict[str, CheckpointTensor]:
    """The tensors of a module: codes, scale and factor.

    Args:
      codes: U8 or I8 [out, in / 2].
      scale: U8 or F8_E8M0 [out, in / 32], or F8_E4M3 [out, in / 16].
      factor: F32 [out], multiplies the scales.

    Raises ValueError that names the tensor which does not fit.
    """
    if codes.dtype not in ("U8", "I8") or len(codes.shape) != 2:
        raise ValueError(
            f"{codes.name} is {codes.dtype} {list(codes.shape)}, but must be bytes (U8) [outputs, "
            "inputs / 2]"
        )
    if (group := GROUPS.get(scale.dtype)) is None:
        raise ValueError(
            f"{scale.name} has dtype {scale.dtype}: scales of 4-bit floats are {', '.join(GROUPS)}"
        )
    outputs, size = codes.shape[0], 2 * codes.shape[1]
    if size % group:
        raise ValueError(f"groups of {group} do not divide the {size} inputs of {module}")
    check_shape(scale, (outputs, size // group))
    parts: dict[str, CheckpointTensor] = {"codes": as_bytes(codes), "scale": checked_scales(scale)}
    if factor is not None:
        parts["factor"] = factor
    return {f"{module}.{kind}": part for kind, part in parts.items()}


def as_bytes(codes: CheckpointTensor) -> View:
    """The same bits as U8."""

    def compute(*bounds: Bounds) -> np.ndarray:
        return codes.read(*(slice(*each) for each in bounds)).view(np.uint8)

    return View(codes, codes.shape, "U8", compute)


def checked_scales(scale: CheckpointTensor) -> View:
    """Scales of groups: exponents as U8, or numbers in e4m3.

    Reading raises ValueError for those that are no numbers, and for exponents with which a weight
    could be infinite.
    """
    if scale.dtype == E4M3:
        return _checked(scale, E4M3, lambda read: np.isnan(read.astype(np.float32)), "numbers")
    return checked_exponents(scale, MOST_EXPONENT)


def checked_exponents(scale: CheckpointTensor, most: int) -> View:
    """Scales that are exponents, as U8. Reading raises ValueError for those above ``most``."""
    return _checked(scale, "U8", lambda read: read > most, f"exponents up to {most}")


def _checked(
    scale: CheckpointTensor, dtype: str, is_bad: Callable[[np.ndarray], np.ndarray], must: str
) -> View:
    """Scales that are read as they are. Reading raises ValueError for bad ones: all must be what
    ``must`` says."""

    def compute(*bounds: Bounds) -> np.ndarray:
        read = scale.read(*(slice(*each) for each in bounds))
        if (bad := is_bad(read)).any():
            place = np.argwhere(bad)[0]
            where = [int(start + at) for (start, _), at in zip(bounds, place, strict=True)]
            raise ValueError(
                f"{scale.file}: {scale.name} has the scale {read[tuple(place)]} at {where}: all "
                f"must be {must}"
            )
        return read

    return View(scale, scale.shape, dtype, compute)


def factor_of(tensor: CheckpointTensor, outputs: int, *, divides: bool) -> View:
    """The number of a whole tensor, for each of its outputs: F32 [outputs].

    ``divides``: scales are divided by it; the result is its reciprocal.

    Raises ValueError for other than a single number above 0.
    """
    if tensor.dtype not in FLOAT_SCALES or tensor.shape not in ((), (1,)):
        raise ValueError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, but must be a single F32, BF16 "
            "or F16"
        )

    def compute(rows: Bounds) -> np.ndarray:
        number = tensor.read().astype(np.float32).reshape(())
        if not (np.isfinite(number) and number > 0):
            raise ValueError(f"{tensor.file}: {tensor.name} is {number}, but must be above 0")
        return np.full(rows[1] - rows[0], 1 / number if divides else number, np.float32)

    return View(tensor, (outputs,), "F32", compute)


def with_pairs(stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, integers of 4 bits of experts as bytes: ``<name>.pairs`` in
    place of ``<name>.values``."""
    tensors = dict(stored)
    for name, tensor in stored.items():
        module = name.removesuffix(".values")
        if module != name and tensor.dtype == "I4" and OF_EXPERT.search(name):
            del tensors[name]
            tensors[f"{module}.pairs"] = _pairs(tensor)
    return tensors


def _pairs(values: CheckpointTensor) -> View:
    """Signed integers [out, in] plus 8, two in a byte: U8 [out, in / 2]."""
    outputs, size = values.shape
    if size % 2:
        raise ValueError(f"{values.name} has {size} inputs: experts of 4 bits have an even number")

    def compute(rows: Bounds, columns: Bounds) -> np.ndarray:
        fields = values.read(slice(*rows), slice(2 * columns[0], 2 * columns[1])) + 8
        fields = fields.astype(np.uint8)
        return fields[:, ::2] | fields[:, 1::2] << 4

    return View(values, (outputs, size // 2), "U8", compute)
