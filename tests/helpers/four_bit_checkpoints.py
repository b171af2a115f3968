"""Checkpoints of 4-bit experts, written from their formats' descriptions, and dense ones that mean
the same weights. Nothing here uses the package's packing."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from tests.helpers.quantized_checkpoints import Format, Tensors, compressed, write

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])
E4M3 = ml_dtypes.float8_e4m3fn


def two_in_a_byte(fields: np.ndarray) -> np.ndarray:
    """Bytes [..., n / 2] of integers from 0 to 15: the even one in the low half."""
    return (fields[..., ::2] + 16 * fields[..., 1::2]).astype(np.uint8)


def nearest(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The codes [..., in] of the numbers nearest to weights over scales [..., groups]."""
    steps = weight.reshape(*scale.shape, -1) / scale[..., None]
    return np.abs(steps[..., None] - E2M1).argmin(-1).reshape(weight.shape)


def meant(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The weights that codes and their scales mean."""
    numbers = E2M1[codes].reshape(*scale.shape, -1)
    return (numbers * scale[..., None]).reshape(codes.shape).astype(np.float32)


def largest(weight: np.ndarray, group: int) -> np.ndarray:
    return np.abs(weight).reshape(*weight.shape[:-1], -1, group).max(-1) + 1e-9


def exponents(weight: np.ndarray, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of scales of groups [..., groups], and the scales that they mean."""
    stored = (127 + np.ceil(np.log2(largest(weight, group) / 6))).astype(np.uint8)
    return stored, np.exp2(stored.astype(np.float32) - 127)


def write_gpt_oss(source: Path, folder: Path, **fields: Any) -> tuple[Path, Path]:
    """Two copies of a gpt-oss of transformers: as published in MXFP4, and with dense experts [E,
    in, out] of the same weights. ``fields``: further ones of config.json."""
    quantized: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = dense[name] = tensor
            continue
        weight = tensor.swapaxes(1, 2)  # [E, out, in]
        stored, scale = exponents(weight)
        codes = nearest(weight, scale)
        quantized[f"{name}_blocks"] = two_in_a_byte(codes).reshape(*stored.shape, 16)
        quantized[f"{name}_scales"] = stored
        dense[name] = meant(codes, scale).swapaxes(1, 2)
    config = json.loads((source / "config.json").read_text()) | fields
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    others += ["model.embed_tokens", "lm_head"]
    own = {"quant_method": "mxfp4", "modules_to_not_convert": others}
    as_published = write(folder / "quantized", quantized, config | {"quantization_config": own})
    return as_published, write(folder / "dense", dense, config)


def mxfp4() -> Format:
    """compressed-tensors' mxfp4-pack-quantized."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        stored, scale = exponents(weight)
        codes = nearest(weight, scale)
        tensors = {"weight_packed": two_in_a_byte(codes), "weight_scale": stored}
        return tensors, meant(codes, scale)

    return _float4("mxfp4-pack-quantized", write, strategy="group", group_size=32)


def deepseek() -> Format:
    """Experts of DeepSeek-V4: weights are I8, and scales E8M0."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        stored, scale = exponents(weight)
        codes = nearest(weight, scale)
        scales = stored.view(ml_dtypes.float8_e8m0fnu)
        tensors = {"weight": two_in_a_byte(codes).view(np.int8), "scale": scales}
        return tensors, meant(codes, scale)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format(config | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, write)


def nvfp4() -> Format:
    """compressed-tensors' nvfp4-pack-quantized, with activations of 4 bits."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        whole = np.float32(448 * 6 / np.abs(weight).max())
        stored = (largest(weight, 16) / 6 * whole).astype(E4M3)
        scale = stored.astype(np.float32) / whole
        codes = nearest(weight, scale)
        tensors = {
            "weight_packed": two_in_a_byte(codes),
            "weight_scale": stored,
            "weight_global_scale": np.array([whole]),
            "input_global_scale": np.array([3], np.float32),
        }
        return tensors, meant(codes, scale)

    return _float4("nvfp4-pack-quantized", write, strategy="tensor_group", group_size=16)


def modelopt() -> Format:
    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        whole = np.float32(np.abs(weight).max() / (448 * 6))
        stored = (largest(weight, 16) / 6 / whole).astype(E4M3)
        scale = stored.astype(np.float32) * whole
        codes = nearest(weight, scale)
        tensors = {
            "weight": two_in_a_byte(codes),
            "weight_scale": stored,
            "weight_scale_2": np.array(whole),
            "input_scale": np.array(2, np.float32),
        }
        return tensors, meant(codes, scale)

    return Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write)


def _float4(name: str, write: Any, **weights: Any) -> Format:
    config = compressed().config
    fields = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False} | weights
    inputs = fields | {"dynamic": "local"} if "nv" in name else None
    group = {"targets": ["Linear"], "weights": fields, "input_activations": inputs}
    return Format(config | {"format": name, "config_groups": {"group_0": group}}, write)
