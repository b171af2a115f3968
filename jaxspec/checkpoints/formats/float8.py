"""Checkpoints of 8-bit floats (e4m3), as published with ``quant_method: fp8``.

DeepSeek, Qwen and MiniMax have ``weight`` e4m3 [out, in] and ``weight_scale_inv`` [out / 128,
in / 128], rounded up; w = weight * scale in spite of the name. The last block of either dimension
is shorter, if the size is no multiple. MXFP8 has blocks of [1, 32], whose scales are exponents.

Mistral (``activation_scheme: static``) has one ``weight_scale_inv`` for a module, and one
``activation_scale``, with which its inputs are rounded.

DeepSeek-V4's experts are 4-bit floats: ``weight`` I8 [out, in / 2], ``scale`` E8M0 [out, in / 32].
Tensors of all experts: see fused_float8.py.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.formats.eight_bits import BLOCK, GROUP, float8_module
from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.four_bits import float4_module
from jaxspec.checkpoints.formats.fused_float8 import of_each_expert
from jaxspec.checkpoints.formats.plain import PROJECTION, QUANTIZED, check_plain
from jaxspec.checkpoints.formats.views import Tensors, in_file
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

PAIRS = ("I8", "U8")  # dtypes of bytes that hold two floats of 4 bits
# DeepSeek-V4 has ``scale``, files of Mistral's own library ``qscale_weight``.
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
INPUTS = ("activation_scale", "qscale_act")
LISTS = ("modules_to_not_convert", "ignored_layers")


def read_float8(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as values and scale.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    block, is_static = _fields(config)
    stored = of_each_expert(stored, block)
    tensors = dict(stored)
    for name in stored:
        module, _, scales = name.rpartition(".")
        weight = stored.get(f"{module}.weight")
        if scales in SCALES and (scales == SCALES[0] or _is_quantized(module, weight)):
            _check_alone(stored, module, scales)
            del tensors[name]
            tensors.pop(f"{module}.weight", None)
            inputs = next((name for name in INPUTS if f"{module}.{name}" in stored), None)
            _check_inputs(stored, module, inputs, is_static=is_static)
            tensors.pop(f"{module}.{inputs}", None)
            if weight is not None and weight.dtype in PAIRS:
                tensors |= float4_module(module, weight, stored[name])
            else:
                tensors |= float8_module(stored, module, scales, block, inputs)
    check_plain(config, LISTS, stored, tensors)
    return tensors


def read_mxfp8(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """``read_float8`` of files with ``quant_method: mxfp8`` (MiniMax M3): blocks are [1, 32], as
    their configs need not say.

    Raises ValueError as that does, and for other blocks.
    """
    block = config.get("weight_block_size")
    if block not in (None, list(GROUP)):
        raise ValueError(
            f"quantization_config: quant_method mxfp8 goes with weight_block_size {list(GROUP)}, "
            f"not {shown(block)}"
        )
    return read_float8({**config, "weight_block_size": list(GROUP)}, stored)


def _is_quantized(module: str, weight: CheckpointTensor | None) -> bool:
    """Whether a module that has something like scales is quantized. One of those that may be is,
    even if it has lost its weight."""
    return bool(PROJECTION.fullmatch(module)) if weight is None else weight.dtype in QUANTIZED


def _check_alone(stored: Tensors, module: str, scales: str) -> None:
    """Raise ValueError if a module has other scales, too."""
    others = [name for name in SCALES if name != scales and f"{module}.{name}" in stored]
    if others:
        name = in_file(stored, module)
        raise ValueError(f"{name} has {scales} and {others[0]}: keep the one that is its scale")


def _fields(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, bool]:
    """Outputs and inputs of a block, and whether inputs are rounded with scales of the file.

    Raises ValueError that names a field which is not supported.
    """
    fields = Fields("quantization_config", config)
    scheme = fields.must_be("activation_scheme", "dynamic", "static", default="dynamic")
    fields.must_be("fmt", "e4m3", default="e4m3")
    block = fields.must_be("weight_block_size", None, list(BLOCK), list(GROUP))
    # ue8m0: activations' scales are rounded to powers of two where activations are rounded. What
    # the weights mean is the same.
    fields.must_be("scale_fmt", "float", "ue8m0", default="float")
    fields.ignored("quant_method", *LISTS, "dequantize", "expert_dtype")
    fields.check_all_read()
    if scheme == "static" and block is not None:
        raise ValueError(
            f"quantization_config: activation_scheme static goes with weight_block_size null, not "
            f"{block}"
        )
    return None if block is None else (block[0], block[1]), scheme == "static"


def _check_inputs(stored: Tensors, module: str, inputs: str | None, *, is_static: bool) -> None:
    """Raise ValueError unless a module has a scale of its inputs if all have, and only then."""
    said = f"quantization_config: activation_scheme is {'static' if is_static else 'dynamic'}"
    if is_static and inputs is None:
        raise ValueError(f"{in_file(stored, module)}.{INPUTS[0]} is missing, as {said}")
    if inputs is not None and not is_static:
        raise ValueError(f"{in_file(stored, module)}.{inputs} is there, but {said}")
