"""AutoAWQ's format GEMM: 4 bits, packed along the outputs in an order of their own.

A module has ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [in / group, out / 8] and ``scales``
[in / group, out]; w = (q - zero) * scale. Where the config says ``zero_point: false``, as
AutoRound's symmetric files do, all zeros are the middle, 8.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.plain import check_plain
from jaxspec.checkpoints.formats.views import (
    INPUTS_FIRST,
    Tensors,
    inputs_first_module,
    with_modules,
)
from jaxspec.models.tensors import CheckpointTensor

BITS = 4
LIST = "modules_to_not_convert"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, from the low end


def read_awq(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as values, scale and zero.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    fields = Fields("quantization_config", config)
    _check_version(fields)
    fields.must_be("bits", BITS, aliases=("w_bit",))
    has_zeros = fields.flag("zero_point", True)
    fields.must_be("desc_act", False, default=False)
    group = fields.group_size("group_size", aliases=("q_group_size",))
    fields.ignored("quant_method", LIST, "backend", "do_fuse", "exllama_config")
    fields.ignored("fuse_max_seq_len", "modules_to_fuse")
    # GPTQModel's files have its own fields, too. Zeros are stored whatever ``sym`` says.
    fields.ignored("sym", "lm_head", "meta", "pack_dtype", "pack_impl")
    fields.check_all_read()

    def module_of(module: str) -> dict[str, CheckpointTensor]:
        tensors = inputs_first_module(stored, module, BITS, group, axis=1, order=ORDER)
        if not has_zeros:
            _check_middle(tensors.pop(f"{module}.zero"))
        return tensors

    tensors = with_modules(stored, "qweight", INPUTS_FIRST, module_of, ("qzeros",))
    check_plain(config, (LIST,), stored, tensors)
    return tensors


def _check_middle(zero: CheckpointTensor) -> None:
    """Raise ValueError for zeros other than the middle of the range."""
    if zero.read().any():
        raise ValueError(
            f"{zero.file}: {zero.name} has zeros other than the middle, but quantization_config "
            "says zero_point: false"
        )


def _check_version(fields: Fields) -> None:
    """Raise ValueError for another layout than GEMM, which AutoAWQ and GPTQModel call it in small
    letters or capitals, each under keys of its own."""
    for name in ("version", "format", "checkpoint_format"):
        fields.must_be(name, "gemm", "GEMM", default="gemm")
    fields.must_be("method", "awq", default="awq")
