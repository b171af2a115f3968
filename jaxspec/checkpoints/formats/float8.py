"""Checkpoints of 8-bit floats (e4m3) with scales of outputs or of blocks of 128 x 128.

As published with ``quant_method: fp8`` (DeepSeek, Qwen): ``weight`` e4m3 [out, in] and
``weight_scale_inv`` [out / 128, in / 128]; w = weight * scale in spite of the name.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.views import (
    Tensors,
    View,
    check_shape,
    checked_scales,
    checked_values,
    part_of,
    with_modules,
)
from jaxspec.models.tensors import CheckpointTensor

E4M3 = "F8_E4M3"
BLOCK = (128, 128)


def read_float8(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as values and scale.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    fields = Fields("quantization_config", config)
    fields.must_be("activation_scheme", "dynamic", default="dynamic")
    fields.must_be("fmt", "e4m3", default="e4m3")
    fields.must_be("weight_block_size", list(BLOCK))
    fields.must_be("scale_fmt", "float", default="float")
    fields.ignored("quant_method", "modules_to_not_convert", "ignored_layers", "dequantize")
    fields.check_all_read()
    scales = "weight_scale_inv"

    def module_of(module: str) -> dict[str, CheckpointTensor]:
        return float8_module(stored, module, scales, BLOCK)

    return with_modules(stored, scales, ("weight", scales), module_of)


def float8_module(
    stored: Tensors, module: str, scales: str, block: tuple[int, int] | None
) -> dict[str, CheckpointTensor]:
    """A module's values [out, in] and scale [out, 1], or [out, in / 128] for blocks: each output of
    a block has its own copy."""
    weight, scale = part_of(stored, module, "weight"), part_of(stored, module, scales)
    if weight.dtype != E4M3 or len(weight.shape) != 2:
        raise ValueError(
            f"{weight.name} is {weight.dtype} {list(weight.shape)}, not a {E4M3} matrix"
        )
    outputs, size = weight.shape
    if block is None:
        if scale.shape == (outputs,):
            scale = _column(scale)
        check_shape(scale, (outputs, 1))
        return {
            f"{module}.values": checked_values(weight),
            f"{module}.scale": checked_scales(scale, inputs_first=False),
        }
    rows, columns = block
    if size % columns:
        raise ValueError(
            f"the {size} inputs of {module} are no multiple of {columns}: a last block that is not "
            "full is not supported"
        )
    check_shape(scale, (-(-outputs // rows), size // columns))
    repeated = checked_scales(scale, inputs_first=False, repeats=rows)
    expanded = View(scale, (outputs, size // columns), repeated.dtype, repeated.compute)
    return {f"{module}.values": checked_values(weight), f"{module}.scale": expanded}


def _column(vector: CheckpointTensor) -> View:
    """A vector as a matrix of one column."""

    def compute(rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        return vector.read(slice(*rows))[:, None][:, slice(*columns)]

    return View(vector, (*vector.shape, 1), vector.dtype, compute)
