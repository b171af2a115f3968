"""gpt-oss as published: experts in MXFP4 (``quant_method: mxfp4``), all others in bfloat16.

``<block>.experts.gate_up_proj_blocks`` U8 [E, out, in / 32, 16] holds two inputs a byte, the even
one in the low half, and ``gate_up_proj_scales`` U8 [E, out, in / 32] an exponent for 32 inputs;
``down_proj`` likewise. Outputs of gate and up take turns. Biases are those of other checkpoints of
all experts (see fused_experts.py).
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.four_bits import float4_module
from jaxspec.checkpoints.formats.plain import check_plain
from jaxspec.checkpoints.formats.views import (
    MOST_PROBLEMS,
    Bounds,
    Tensors,
    View,
    check_shape,
    in_file,
)
from jaxspec.checkpoints.fused_experts import OfExpert
from jaxspec.config.checks import Problems
from jaxspec.models.tensors import CheckpointTensor

PARTS = re.compile(
    r"(?P<module>(?P<experts>.*\.experts)\.(?P<kind>gate_up_proj|down_proj))_(blocks|scales)"
)
BYTES = 16  # of a group
LIST = "modules_to_not_convert"


def read_mxfp4(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized experts as codes and scale of each.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    fields = Fields("quantization_config", config)
    fields.ignored("quant_method", LIST, "dequantize")
    fields.check_all_read()
    tensors, problems = dict(stored), Problems()
    for name in stored:
        if (match := PARTS.fullmatch(name)) and name in tensors:
            for part in ("blocks", "scales"):
                tensors.pop(f"{match['module']}_{part}", None)
            with problems.caught():
                tensors |= _of_each(stored, match)
    problems.raise_all(MOST_PROBLEMS)
    check_plain(config, (LIST,), stored, tensors)
    return tensors


def _of_each(stored: Tensors, match: re.Match[str]) -> dict[str, CheckpointTensor]:
    """Codes and scale of each expert, of a tensor of all."""
    codes, scale = _of_all(stored, match["module"])
    tensors: dict[str, CheckpointTensor] = {}
    for expert in range(codes.shape[0]):
        for projection, (first, step) in _places(match["kind"]).items():
            module = f"{match['experts']}.{expert}.{projection}"
            parts = [_of_expert(whole, expert, first, step) for whole in (codes, scale)]
            tensors |= float4_module(module, parts[0], parts[1])
    return tensors


def _places(kind: str) -> dict[str, tuple[int, int]]:
    """The first output of each projection of a tensor, and the step to its next."""
    return {"gate_proj": (0, 2), "up_proj": (1, 2)} if kind == "gate_up_proj" else {kind: (0, 1)}


def _of_expert(whole: CheckpointTensor, expert: int, first: int, step: int) -> OfExpert:
    return OfExpert(whole, expert, first, step, whole.shape[1] // step, inputs_first=False)


def _of_all(stored: Tensors, module: str) -> tuple[View, CheckpointTensor]:
    """Codes [E, out, in / 2] and scale [E, out, in / 32] of all experts."""
    blocks, scale = (stored.get(f"{module}_{part}") for part in ("blocks", "scales"))
    if blocks is None or scale is None:
        missing = "blocks" if blocks is None else "scales"
        name = in_file(stored, module)
        raise ValueError(f"{name} is quantized, but {name}_{missing} is missing")
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != BYTES:
        raise ValueError(
            f"{blocks.name} is {blocks.dtype} {list(blocks.shape)}, but must be U8 [experts, "
            f"outputs, groups, {BYTES}]"
        )
    check_shape(scale, blocks.shape[:-1])

    def compute(experts: Bounds, rows: Bounds, columns: Bounds) -> np.ndarray:
        first, last = columns[0] // BYTES, -(-columns[1] // BYTES)
        read = blocks.read(slice(*experts), slice(*rows), slice(first, last), slice(0, BYTES))
        start = columns[0] - first * BYTES
        return read.reshape(*read.shape[:2], -1)[..., start : start + columns[1] - columns[0]]

    experts, outputs, groups, _ = blocks.shape
    return View(blocks, (experts, outputs, groups * BYTES), "U8", compute), scale
