"""Checkpoints of 8-bit floats (e4m3) with scales of outputs or of blocks of 128 x 128.

As published with ``quant_method: fp8`` (DeepSeek, Qwen, MiniMax): ``weight`` e4m3 [out, in] and
``weight_scale_inv`` [out / 128, in / 128], rounded up; w = weight * scale in spite of the name. The
last block of either dimension is shorter, if the size is no multiple. Which modules are quantized
is what their tensors say. A list of those that are not is only compared with them.

DeepSeek-V4's experts are 4-bit floats: ``weight`` I8 [out, in / 2], ``scale`` E8M0 [out, in / 32].
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.four_bits import float4_module
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
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

E4M3 = "F8_E4M3"
PAIRS = ("I8", "U8")  # dtypes of bytes that hold two floats of 4 bits
QUANTIZED = (E4M3, *PAIRS)
BLOCK = (128, 128)
SCALES = ("weight_scale_inv", "weight_scale", "scale")  # DeepSeek-V4 has the last
LISTS = ("modules_to_not_convert", "ignored_layers")
# Projections of attention and MLPs, which are those that checkpoints quantize. An indexer's weights
# of heads are not; the list of GLM-5.2 has another name for them.
PROJECTION = re.compile(
    r"(?:.*\.)?(?P<place>layers\.\d+\.\w+\.(?:.*\.)?(?:(?<!indexer\.)\w+_proj|w[123]))"
)


def read_float8(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as values and scale.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    fields = Fields("quantization_config", config)
    fields.must_be("activation_scheme", "dynamic", default="dynamic")
    fields.must_be("fmt", "e4m3", default="e4m3")
    fields.must_be("weight_block_size", list(BLOCK))
    # ue8m0: activations' scales are rounded to powers of two where activations are rounded. What
    # the weights mean is the same.
    fields.must_be("scale_fmt", "float", "ue8m0", default="float")
    fields.ignored("quant_method", *LISTS, "dequantize", "expert_dtype")
    fields.check_all_read()
    tensors = dict(stored)
    for name in stored:
        module, _, scales = name.rpartition(".")
        weight = stored.get(f"{module}.weight")
        is_scale = scales == SCALES[0] or (weight is not None and weight.dtype in QUANTIZED)
        if scales in SCALES and is_scale:
            del tensors[name]
            tensors.pop(f"{module}.weight", None)
            if weight is not None and weight.dtype in PAIRS:
                tensors |= float4_module(module, weight, stored[name])
            else:
                tensors |= float8_module(stored, module, scales, BLOCK)
    _check_plain(config, tensors)
    return tensors


def float8_module(
    stored: Tensors, module: str, scales: str, block: tuple[int, int] | None
) -> dict[str, CheckpointTensor]:
    """A module's values [out, in] and scale [out, 1], or [out, groups] for blocks: each output of a
    block has its own copy. Groups are of 128 inputs, or where the last block is shorter of as many
    as divide both. An expert's scales stay as they are stored, and are called ``blocks``."""
    weight, scale = part_of(stored, module, "weight"), part_of(stored, module, scales)
    if weight.dtype != E4M3 or len(weight.shape) != 2:
        raise ValueError(
            f"{weight.name} is {weight.dtype} {list(weight.shape)}, not a {E4M3} matrix"
        )
    outputs, size = weight.shape
    scale = as_numbers(_column(scale) if block is None and len(scale.shape) == 1 else scale)
    rows, columns = (1, size) if block is None else block
    check_shape(scale, (-(-outputs // rows), -(-size // columns)))
    values = checked_values(weight)
    if OF_EXPERT.search(module):
        blocks = checked_scales(scale, inputs_first=False)
        return {f"{module}.values": values, f"{module}.blocks": blocks}
    return {f"{module}.values": values, f"{module}.scale": _by_output(scale, weight, rows, columns)}


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


def _column(vector: CheckpointTensor) -> View:
    """A vector as a matrix of one column."""

    def compute(rows: Bounds, columns: Bounds) -> Any:
        return vector.read(slice(*rows))[:, None][:, slice(*columns)]

    return View(vector, (*vector.shape, 1), vector.dtype, compute)


def _check_plain(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Raise ValueError for a weight of 8 bits without scales, and for a projection without them
    that the config's list does not name, if there is such a list."""
    key = next((key for key in LISTS if config.get(key)), None)
    listed = None if key is None else config[key]
    if listed is not None and not (
        isinstance(listed, list) and all(isinstance(name, str) for name in listed)
    ):
        raise ValueError(f"quantization_config: {key} must be a list of names, got {shown(listed)}")
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name:
            continue
        if tensor.dtype == E4M3:
            raise ValueError(f"{tensor.name} is {E4M3}, but {module}.{SCALES[0]} is missing")
        match = PROJECTION.fullmatch(module) if listed else None
        if match and listed and not any(_names(entry, match["place"]) for entry in listed):
            raise ValueError(
                f"{tensor.name} is {tensor.dtype} and has no {module}.{SCALES[0]}, but "
                f"quantization_config: {key} does not name it"
            )


def _names(entry: str, place: str) -> bool:
    """Whether an entry of a list means the module at ``place``, which begins with ``layers``.
    Entries may begin with the prefix of another class that wraps the model, be an expression or the
    last names of a module, or name a module that holds it."""
    if entry.startswith("re:"):
        try:
            return re.search(entry.removeprefix("re:"), place) is not None
        except re.error:
            return False
    found = re.search(r"(^|\.)(layers\.\d+(\..*)?)$", entry)
    entry = found[2] if found else entry
    return f".{entry}." in f".{place}."
