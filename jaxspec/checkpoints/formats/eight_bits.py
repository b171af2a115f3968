"""Modules of 8-bit floats (e4m3): scales of a tensor, of outputs, of blocks, or of 32 inputs.

``weight`` is e4m3 [out, in], and w = weight * scale. Scales that are bytes are exponents:
2^(byte - 127). Inputs of modules may have a scale, too, which was measured when the file was
written. Experts keep their scales as they are stored, and their inputs are not rounded.
"""

import math
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.four_bits import E4M3, checked_exponents, factor_of
from jaxspec.checkpoints.formats.views import (
    OF_EXPERT,
    Bounds,
    Tensors,
    View,
    as_numbers,
    check_shape,
    checked_scales,
    checked_values,
    part_of,
)
from jaxspec.models.tensors import CheckpointTensor

BLOCK = (128, 128)  # outputs and inputs
GROUP = (1, 32)  # of MXFP8
MOST_EXPONENT = 246  # 448 * 2^(246 - 127) is the largest number that float32 has


def float8_module(
    stored: Tensors,
    module: str,
    scales: str,
    block: tuple[int, int] | None,
    inputs: str | None = None,
) -> dict[str, CheckpointTensor]:
    """A module's values [out, in] and scale: [out, 1], or [out, groups] for blocks, where each
    output of a block has its own copy. Groups are of as many inputs as a block, or where the last
    block is shorter of as many as divide both. An expert's scales stay as they are stored, and are
    called ``blocks``.

    Args:
      scales: the name of its scales.
      block: outputs and inputs that share a scale; None: each output has one, or all have the same,
        as the shape of the scales says. A single number is of all in any case.
      inputs: the name of the scale of its inputs, a single number; None: they are rounded with a
        scale for each token.

    Raises ValueError that names the tensor which does not fit.
    """
    weight, scale = part_of(stored, module, "weight"), part_of(stored, module, scales)
    if weight.dtype != E4M3 or len(weight.shape) != 2:
        raise ValueError(
            f"{weight.name} is {weight.dtype} {list(weight.shape)}, not a {E4M3} matrix"
        )
    outputs, size = weight.shape
    rows, columns = _block(scale, weight, block)
    scale = _matrix(scale) if len(scale.shape) < 2 else scale
    check_shape(scale, (-(-outputs // rows), -(-size // columns)))
    values = checked_values(weight)
    if OF_EXPERT.search(module):
        return {f"{module}.values": values, f"{module}.blocks": _of_expert(scale)}
    tensors: dict[str, CheckpointTensor] = {
        f"{module}.values": values,
        f"{module}.scale": _by_output(as_numbers(scale), weight, rows, columns),
    }
    if inputs is not None:
        measured = part_of(stored, module, inputs)
        tensors[f"{module}.inputs"] = factor_of(measured, outputs, divides=False)
    return tensors


def _block(
    scale: CheckpointTensor, weight: CheckpointTensor, block: tuple[int, int] | None
) -> tuple[int, ...]:
    """Outputs and inputs that share a scale: see ``float8_module``."""
    if math.prod(scale.shape) == 1 and (block is None or len(scale.shape) < 2):
        return weight.shape
    return block or (1, weight.shape[1])


def _matrix(scale: CheckpointTensor) -> View:
    """A number or a vector as a matrix of one column."""

    def compute(rows: Bounds, columns: Bounds) -> Any:
        return scale.read().reshape(-1, 1)[slice(*rows), slice(*columns)]

    return View(scale, (math.prod(scale.shape), 1), scale.dtype, compute)


def _of_expert(scale: CheckpointTensor) -> View:
    """Scales of an expert: those of MXFP8, which are many, stay bytes."""
    if scale.dtype == "U8":
        return checked_exponents(scale, MOST_EXPONENT)
    return checked_scales(as_numbers(scale), inputs_first=False)


def _by_output(scale: CheckpointTensor, weight: CheckpointTensor, rows: int, columns: int) -> View:
    """Scales [out, groups] of the blocks of a weight [out, in]."""
    outputs, size = weight.shape
    group = math.gcd(size, columns)
    repeated = checked_scales(scale, inputs_first=False, repeats=rows)

    def compute(outputs: Bounds, groups: Bounds) -> np.ndarray:
        of_group = np.arange(*groups) * group // columns
        first, last = groups[0] * group // columns, -(-groups[1] * group // columns)
        return repeated.compute(outputs, (first, last))[:, of_group - first]

    return View(scale, (outputs, size // group), repeated.dtype, compute)
