"""Quantized checkpoints, whatever their format, as the same few tensors of each module.

A quantized module ``<name>`` has, in place of ``<name>.weight``:

- ``<name>.values``: [out, in] signed integers (I4 or I8), or floats of 8 bits (F8_E4M3),
- ``<name>.scale``: [out, groups],
- ``<name>.zero``: [out, groups] whole numbers in the scales' dtype, if they are not all 0,
- ``<name>.groups``: int32 [in], the group of each input, if groups do not follow each other,
- ``<name>.blocks``: of an expert's 8-bit floats, in place of ``scale``: the scales of blocks of
  outputs and inputs, as they are stored,
- ``<name>.rounds``: empty; it is there if the inputs of integers are rounded to e4m3 when they are
  used, with a scale for each token. Those of 8-bit floats always are, but for experts,
- ``<name>.inputs``: [out], of 8-bit floats: the scale with which inputs are rounded in place of one
  for each token, the same for all outputs.

w = (values - zero) * scale. Floats of 4 bits, and experts' integers, are bytes (U8), two in each
(four_bits.py):

- ``<name>.pairs``: [out, in / 2] integers plus 8, of experts, in place of ``values``,
- ``<name>.codes``: [out, in / 2] floats, whose scale may be U8, 2^(scale - 127),
- ``<name>.factor``: [out] multiplies the scales of floats, if it is there.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.checkpoints.formats.awq import read_awq
from jaxspec.checkpoints.formats.compressed_tensors import read_compressed_tensors
from jaxspec.checkpoints.formats.float8 import read_float8, read_mxfp8
from jaxspec.checkpoints.formats.four_bits import with_pairs
from jaxspec.checkpoints.formats.gptq import read_gptq
from jaxspec.checkpoints.formats.modelopt import read_modelopt
from jaxspec.checkpoints.formats.mxfp4 import read_mxfp4
from jaxspec.checkpoints.formats.views import Tensors
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

METHODS = MappingProxyType(
    {
        "awq": read_awq,
        "gptq": read_gptq,
        "compressed-tensors": read_compressed_tensors,
        "fp8": read_float8,
        "mxfp4": read_mxfp4,
        "mxfp8": read_mxfp8,
        "modelopt": read_modelopt,
    }
)
CONFIG_KEYS = ("quantization_config", "compression_config")


def named_quantization(config: Mapping[str, Any]) -> Any:
    """What the contents of config.json say of a quantization, for the whole model or for its text
    model, as Kimi K2.5's do; None if they name none."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    found = (part[key] for part in parts for key in CONFIG_KEYS if part.get(key) is not None)
    return next(found, None)


def canonical(quantization: Any, stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint as above; unchanged if ``quantization``, its
    quantization_config, is None.

    Raises ValueError that names what is not supported or does not fit.
    """
    if quantization is None:
        return dict(stored)
    method = _method(quantization) if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        supported = ", ".join(METHODS)
        raise ValueError(
            f"quantization_config: quant_method {shown(method)} is not supported; supported are "
            f"{supported}"
        )
    return with_pairs(METHODS[method](quantization, stored))


def _method(quantization: Mapping[str, Any]) -> Any:
    """Some files of ModelOpt name its algorithm, and not itself."""
    implied = "modelopt" if "quant_algo" in quantization else None
    return quantization.get("quant_method", implied)
