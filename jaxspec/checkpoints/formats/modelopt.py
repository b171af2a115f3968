"""NVIDIA ModelOpt's NVFP4: 4-bit floats with scales of 16 inputs, and one of the whole tensor.

A module has ``weight`` U8 [out, in / 2], ``weight_scale`` e4m3 [out, in / 16] and
``weight_scale_2`` F32, which multiplies the scales. Activations stay as they are: ``input_scale``
is not read, nor are scales of 8-bit caches (``k_scale``, ``v_scale``). What is said of the
quantization stands in config.json, or under ``quantization`` in hf_quant_config.json.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.four_bits import factor_of, float4_module
from jaxspec.checkpoints.formats.views import Tensors, part_of, with_modules
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

PARTS = ("weight", "weight_scale", "weight_scale_2")
OF_CACHES = (".k_scale", ".v_scale")


def read_modelopt(config: Mapping[str, Any], stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as codes, scale and factor.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    _check(config)

    def module_of(module: str) -> dict[str, CheckpointTensor]:
        codes, scale, whole = (part_of(stored, module, part) for part in PARTS)
        if scale.dtype != "F8_E4M3":
            raise ValueError(f"{scale.name} has dtype {scale.dtype}: scales of NVFP4 are F8_E4M3")
        factor = factor_of(whole, codes.shape[0], divides=False)
        return float4_module(module, codes, scale, factor)

    tensors = with_modules(stored, PARTS[-1], (*PARTS, "input_scale"), module_of)
    return {name: one for name, one in tensors.items() if not name.endswith(OF_CACHES)}


def _check(config: Mapping[str, Any]) -> None:
    """Raise ValueError that names a field which is not supported."""
    content = config.get("quantization", config)  # of hf_quant_config.json
    if not isinstance(content, dict):
        raise ValueError(f"quantization must be an object, got {shown(content)}")
    fields = Fields("quantization_config", content)
    fields.must_be("quant_algo", "NVFP4", "W4A16_NVFP4")
    fields.must_be("group_size", 16, default=16)
    fields.ignored("quant_method", "producer", "config_groups", "ignore", "exclude_modules")
    fields.ignored("kv_cache_scheme", "kv_cache_quant_algo", "quantized_layers")
    fields.check_all_read()
