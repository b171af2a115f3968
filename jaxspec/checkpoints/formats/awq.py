"""AutoAWQ's format GEMM: 4 bits, packed along the outputs in an order of their own.

A module has ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [in / group, out / 8] and ``scales``
[in / group, out]; w = (q - zero) * scale.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.packing import per_word
from jaxspec.checkpoints.formats.views import (
    Tensors,
    check_divides,
    check_shape,
    check_words,
    checked_scales,
    modules_of,
    packed_integers,
    part_of,
    zeros_like_scales,
)
from jaxspec.models.tensors import CheckpointTensor

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, from the low end
PARTS = ("qweight", "qzeros", "scales")


def read_awq(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as values, scale and zero.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    fields = Fields("quantization_config", config)
    fields.must_be("version", "gemm", default="gemm")
    fields.must_be("bits", BITS, aliases=("w_bit",))
    fields.must_be("zero_point", True, default=True)
    group = fields.group_size("group_size", aliases=("q_group_size",))
    fields.ignored("quant_method", "modules_to_not_convert", "backend", "do_fuse", "exllama_config")
    fields.ignored("fuse_max_seq_len", "modules_to_fuse")
    fields.check_all_read()
    tensors = dict(stored)
    for module in modules_of(stored, "qweight"):
        tensors |= _module(stored, module, group)
        for part in PARTS:
            del tensors[f"{module}.{part}"]
    return tensors


def _module(stored: Tensors, module: str, group: int | None) -> dict[str, CheckpointTensor]:
    words, zeros, scales = (part_of(stored, module, part) for part in PARTS)
    size, columns = words.shape[0], words.shape[-1]
    groups = check_divides(module, size, group or size)
    check_words(words, (size, columns))
    check_words(zeros, (groups, columns))
    check_shape(scales, (groups, columns * per_word(BITS)))
    zeros_as_stored = packed_integers(zeros, BITS, 1, inputs_first=True, order=ORDER)
    return {
        f"{module}.values": packed_integers(words, BITS, 1, inputs_first=True, order=ORDER),
        f"{module}.zero": zeros_like_scales(zeros_as_stored, scales),
        f"{module}.scale": checked_scales(scales, inputs_first=True),
    }
