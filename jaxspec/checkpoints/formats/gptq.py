"""GPTQ's formats: 4 or 8 bits, packed along the inputs.

A module has ``qweight`` int32 [in * bits / 32, out], ``qzeros`` int32 [in / group, out * bits /
32], ``scales`` [in / group, out] and ``g_idx`` int32 [in], the group of each input ("act-order"
mixes the groups); w = (q - zero) * scale. Version 1 stores zero - 1.

Some tools write version 2 and say version 1. With ``sym`` that is seen, as all zeros are the middle
of the range: then what is stored tells the version. Without it the file's word is taken.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.views import (
    INPUTS_FIRST,
    Tensors,
    inputs_first_module,
    part_of,
    with_modules,
)
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

VERSIONS = ("gptq", "gptq_v2")
# Of the tools that wrote the file.
HARMLESS = (
    *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential"),
    *("model_name_or_path", "model_file_base_name", "meta", "lm_head", "pack_dtype", "dataset"),
    *("tokenizer", "use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "batch_size"),
    *("module_name_preceding_first_block", "pad_token_id", "use_exllama", "max_input_length"),
    *("exllama_config", "cache_block_outputs", "modules_in_block_to_quantize", "backend"),
    *("is_marlin_format", "disable_exllama", "pack_impl", "act_group_aware", "mse", "gptaq"),
    *("gptaq_alpha", "mock_quantization", "offload_to_disk", "offload_to_disk_path"),
)


def read_gptq(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as values, scale, zero and groups.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    fields = Fields("quantization_config", config)
    version = fields.must_be("checkpoint_format", *VERSIONS, aliases=("format",), default="gptq")
    fields.must_be("format", version, default=version)  # GPTQModel writes both
    fields.must_be("method", "gptq", default="gptq")
    bits = fields.must_be("bits", 4, 8)
    symmetric, ordered = fields.flag("sym", True), fields.flag("desc_act", False)
    group = fields.group_size("group_size")
    overrides = fields.get("dynamic", default={})
    if not isinstance(overrides, dict) or any(not name.startswith("-:") for name in overrides):
        raise ValueError(
            f"quantization_config: dynamic (= {shown(overrides)}) may only leave modules out: "
            "settings of single modules are not supported"
        )
    fields.ignored(*HARMLESS)
    fields.check_all_read()
    shifts, is_first = dict[int, CheckpointTensor](), version == "gptq"

    def module_of(module: str) -> dict[str, CheckpointTensor]:
        if ordered:
            part_of(stored, module, "g_idx")
        add = 1 if is_first else 0
        tensors = inputs_first_module(stored, module, bits, group, axis=0, add=add)
        if symmetric:
            zero = tensors.pop(f"{module}.zero")
            shifts.setdefault(shift_of_zeros(zero, 1 if is_first else -1), zero)
        groups, size = (tensors[f"{module}.{part}"].shape[1] for part in ("scale", "values"))
        mixed = mixed_groups(stored.get(f"{module}.g_idx"), size, groups)
        return tensors if mixed is None else tensors | {f"{module}.groups": mixed}

    parts = (*INPUTS_FIRST, "g_idx")
    tensors = with_modules(stored, "qweight", parts, module_of, ("qzeros",))
    if len(shifts) > 1:
        first, second = (f"{zero.file}: {zero.name}" for zero in shifts.values())
        raise ValueError(
            f"{first} and {second} store the middle zero differently: they are of two versions of "
            "the format, and quantization_config has one checkpoint_format"
        )
    return tensors


def mixed_groups(index: CheckpointTensor | None, size: int, groups: int) -> CheckpointTensor | None:
    """The group of each input; None if they follow each other. Raises ValueError for others than
    there are."""
    if index is None:
        return None
    if index.dtype != "I32" or index.shape != (size,):
        raise ValueError(f"{index.name} is {index.dtype} {list(index.shape)}, not I32 [{size}]")
    group_of_input = index.read()
    first, last = group_of_input.min(), group_of_input.max()
    if first < 0 or last >= groups:
        raise ValueError(
            f"{index.file}: {index.name} names groups {first} to {last}, but there are {groups}"
        )
    return None if np.array_equal(group_of_input, np.arange(size) // (size // groups)) else index


def shift_of_zeros(zero: CheckpointTensor, other: int) -> int:
    """What the zeros of a symmetric module differ by from the middle of the range, as
    ``checkpoint_format`` says that they are stored: nothing, or ``other`` if they are stored as in
    the other version.

    Raises ValueError for others.
    """
    found = np.unique(zero.read())
    if len(found) == 1 and found[0] in (0, other):
        return int(found[0])
    raise ValueError(
        f"{zero.file}: {zero.name} has zeros other than the middle, but quantization_config says "
        "sym: true"
    )
