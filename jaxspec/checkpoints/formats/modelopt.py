"""NVIDIA ModelOpt's formats: 4-bit and 8-bit floats.

- NVFP4: ``weight`` U8 [out, in / 2], ``weight_scale`` e4m3 [out, in / 16], and ``weight_scale_2``
  F32, which multiplies the scales. Activations stay as they are: ``input_scale`` is not read.
- FP8: ``weight`` e4m3, one ``weight_scale``, and one ``input_scale`` that inputs are rounded with.
- FP8_PER_CHANNEL_PER_TOKEN: ``weight_scale`` [out].
- MXFP8: ``weight_scale`` U8 [out, in / 32], exponents.

Tensors of all experts: see fused_modelopt.py. Files of several formats (MIXED_PRECISION) are read,
too: tensors say which a module has. Scales of 8-bit caches (``k_scale``, ``v_scale``) are not read.
What is said of the quantization stands in config.json, or under ``quantization`` in
hf_quant_config.json.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.checkpoints.formats.eight_bits import GROUP, float8_module
from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.four_bits import E4M3, factor_of, float4_module
from jaxspec.checkpoints.formats.fused_modelopt import of_each_expert
from jaxspec.checkpoints.formats.plain import check_plain
from jaxspec.checkpoints.formats.views import Tensors, part_of, with_modules
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

NVFP4 = ("weight", "weight_scale", "weight_scale_2")
FLOAT8 = ("weight", "weight_scale")
INPUTS = "input_scale"
OF_CACHES = (".k_scale", ".v_scale")
LISTS = ("ignore", "exclude_modules")
MIXED = "MIXED_PRECISION"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")
GROUPS = MappingProxyType({"MXFP8": (32,), MIXED: (16, 32)})  # inputs of a group; of others 16


def read_modelopt(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as the package's.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    content = _checked(config)
    stored = of_each_expert(stored)

    def nvfp4(module: str) -> dict[str, CheckpointTensor]:
        codes, scale, whole = (part_of(stored, module, part) for part in NVFP4)
        if scale.dtype != E4M3:
            raise ValueError(f"{scale.name} has dtype {scale.dtype}: scales of NVFP4 are {E4M3}")
        factor = factor_of(whole, codes.shape[0], divides=False)
        return float4_module(module, codes, scale, factor)

    def by_weight(module: str) -> dict[str, CheckpointTensor]:
        if part_of(stored, module, FLOAT8[0]).dtype == "U8":
            return nvfp4(module)
        block = GROUP if part_of(stored, module, FLOAT8[1]).dtype == "U8" else None
        inputs = INPUTS if f"{module}.{INPUTS}" in stored else None
        return float8_module(stored, module, FLOAT8[1], block, inputs)

    tensors = with_modules(stored, NVFP4[-1], (*NVFP4, INPUTS), nvfp4)
    tensors = with_modules(tensors, FLOAT8[-1], (*FLOAT8, INPUTS), by_weight)
    check_plain(content, LISTS, stored, tensors)
    return {name: found for name, found in tensors.items() if not name.endswith(OF_CACHES)}


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of the quantization. Raises ValueError that names a field which is not
    supported."""
    content = config.get("quantization", config)  # of hf_quant_config.json
    if not isinstance(content, dict):
        raise ValueError(f"quantization must be an object, got {shown(content)}")
    fields = Fields("quantization_config", content)
    algorithm = fields.must_be("quant_algo", *ALGORITHMS, MIXED)
    sizes = GROUPS.get(algorithm, (16,))
    fields.must_be("group_size", *sizes, default=sizes[0])
    modules = fields.get("quantized_layers", default={}) if algorithm == MIXED else {}
    if not isinstance(modules, dict) or not all(isinstance(x, dict) for x in modules.values()):
        raise ValueError(
            f"quantization_config: quantized_layers must be an object of objects, got "
            f"{shown(modules)}"
        )
    for name, module in modules.items():
        Fields(f"quantization_config: quantized_layers.{name}", module).must_be(
            "quant_algo", *ALGORITHMS
        )
    fields.ignored("quant_method", "producer", "config_groups", *LISTS, "quantized_layers")
    fields.ignored("kv_cache_scheme", "kv_cache_quant_algo")
    fields.check_all_read()
    return content
