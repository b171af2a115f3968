"""Modules of 4-bit floats that are widened while they are read: what the model has no quantized
Linear for.

These are projections that are computed together and stored in several formats, projections with
multipliers, and weights that are no Linear's.
"""

from collections.abc import Collection, Mapping

import numpy as np

from jaxspec.checkpoints.formats.views import Bounds, View
from jaxspec.models.tensors import CheckpointTensor

PARTS = ("codes", "scale", "factor")  # see formats
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NUMBERS = np.concatenate([E2M1, -E2M1])  # by code


def with_widened(
    stored: Mapping[str, CheckpointTensor], wanted: Collection[str]
) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, with weights in place of 4-bit floats where weights are wanted.

    ``wanted``: names of tensors that are read.
    """
    tensors = dict(stored)
    for name in wanted:
        module = name.removesuffix(".weight")
        if module == name or name in stored or f"{module}.codes" not in stored:
            continue
        tensors[name] = widened(stored, module)
        for part in PARTS:
            tensors.pop(f"{module}.{part}", None)
    return tensors


def matrix_of(stored: Mapping[str, CheckpointTensor], module: str) -> CheckpointTensor | None:
    """The matrix [out, in] of a module, quantized or not: its shape and its name count. None: it
    has none."""
    for kind in ("weight", "values"):
        if (found := stored.get(f"{module}.{kind}")) is not None:
            return found
    return widened(stored, module) if f"{module}.codes" in stored else None


def widened(stored: Mapping[str, CheckpointTensor], module: str) -> View:
    """The weights F32 [out, in] of a module of 4-bit floats."""
    codes, scale, factor = (stored.get(f"{module}.{part}") for part in PARTS)
    assert codes is not None and scale is not None
    outputs, pairs = codes.shape
    group = 2 * pairs // scale.shape[1]

    def compute(rows: Bounds, columns: Bounds) -> np.ndarray:
        first, last = columns[0] // group, -(-columns[1] // group)
        read = codes.read(slice(*rows), slice(first * group // 2, last * group // 2))
        numbers = NUMBERS[np.stack([read & 15, read >> 4], axis=-1)]
        scales = scale.read(slice(*rows), slice(first, last))
        if scales.dtype == np.uint8:
            scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        scales = scales.astype(np.float32)
        if factor is not None:
            scales = scales * factor.read(slice(*rows))[:, None]
        weights = (numbers.reshape(*scales.shape, group) * scales[..., None]).reshape(len(read), -1)
        return weights[:, columns[0] - first * group : columns[1] - first * group]

    return View(codes, (outputs, 2 * pairs), "F32", compute)
