"""Quantized checkpoints of random integers, each field written from its format's description.

Nothing here uses the package's own packing: every word is put together bit by bit.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Format:
    """A file format: its ``quantization_config``, and a writer of one module.

    ``write`` takes the module's dense weight [out, in] and a random generator. It returns tensors
    by suffix, and the dense weight that they mean.
    """

    config: dict[str, Any]
    write: Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]


def words(fields: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words of the unsigned integers [rows, columns], along the columns."""
    count = 32 // bits
    rows, columns = fields.shape
    packed = np.zeros((rows, -(-columns // count)), np.int64)
    for column in range(columns):
        place = column % count
        if order is not None:
            place = order.index(place)
        packed[:, column // count] |= fields[:, column].astype(np.int64) << (bits * place)
    return packed.astype(np.uint32).view(np.int32)


def rounded(
    weight: np.ndarray, bits: int, group: int, rng: np.random.Generator, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned integers [out, in], float16 scales and unsigned zeros [out, in / group]: the
    weight roughly, as its text does not matter, but with every integer in use."""
    outputs, inputs = weight.shape
    groups, middle = inputs // group, 2 ** (bits - 1)
    shape = (outputs, groups)
    zero = np.full(shape, middle) if symmetric else rng.integers(middle - 2, middle + 3, shape)
    largest = np.abs(weight).reshape(*shape, group).max(-1)
    scale = (largest / (middle - 3) * rng.uniform(0.9, 1.1, shape)).astype(np.float16)
    steps = weight / np.repeat(scale.astype(np.float32), group, 1) + np.repeat(zero, group, 1)
    return np.clip(np.round(steps), 0, 2**bits - 1).astype(np.int64), scale, zero


def dense(q: np.ndarray, scale: np.ndarray, zero: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return ((q - zero[:, groups]) * scale.astype(np.float32)[:, groups]).astype(np.float32)


def order_of(inputs: int, *, ordered: bool) -> np.ndarray:
    """In which inputs are grouped. All modules that read the same inputs have the same order."""
    return np.random.default_rng(inputs).permutation(inputs) if ordered else np.arange(inputs)


def natural_order(q: np.ndarray, order: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers [out, in] in the order of the inputs, and the group of each input."""
    natural, groups = np.empty_like(q), np.empty(len(order), np.int32)
    natural[:, order], groups[order] = q, np.arange(len(order)) // group
    return natural, groups


def awq(group: int = 32) -> Format:
    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        q, scale, zero = rounded(weight, 4, group, rng, symmetric=False)
        tensors = {
            "qweight": words(q.T, 4, AWQ_ORDER),
            "qzeros": words(zero.T, 4, AWQ_ORDER),
            "scales": scale.T,
        }
        return tensors, dense(q, scale, zero, np.arange(weight.shape[1]) // group)

    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group}
    return Format({**config, "zero_point": True, "modules_to_not_convert": None}, write)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    version: int = 1,
    symmetric: bool = True,
    ordered: bool = False,
) -> Format:
    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size = weight.shape[1] if group == -1 else group
        order = order_of(weight.shape[1], ordered=ordered)
        q, scale, zero = rounded(weight[:, order], bits, size, rng, symmetric=symmetric)
        natural, groups = natural_order(q, order, size)
        stored = (zero - 1) % 2**bits if version == 1 else zero
        tensors = {
            "qweight": np.ascontiguousarray(words(natural, bits).T),
            "qzeros": words(stored.T, bits),
            "scales": scale.T,
            "g_idx": groups,
            "bias": np.zeros(len(weight), np.float16),
        }
        return tensors, dense(natural, scale, zero, groups)

    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group}
    config |= {"sym": symmetric, "desc_act": ordered, "damp_percent": 0.01, "lm_head": False}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Format(config, write)


def compressed(
    bits: int = 4,
    group: int | None = 32,
    *,
    symmetric: bool = True,
    rounds: bool = False,
    ordered: bool = False,
) -> Format:
    """``group`` None: a scale for each output. ``rounds``: inputs are rounded (W4AFP8)."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size, order = group or weight.shape[1], order_of(weight.shape[1], ordered=ordered)
        q, scale, zero = rounded(weight[:, order], bits, size, rng, symmetric=symmetric)
        q, groups = natural_order(q, order, size)
        tensors = {
            "weight_packed": words(q, bits),
            "weight_scale": scale,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        if ordered:
            tensors["weight_g_idx"] = groups
        return tensors, dense(q, scale, zero, groups)

    weights = {
        **{"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False},
        **{"strategy": "group" if group else "channel", "group_size": group},
        **{"observer": "minmax", "observer_kwargs": {}, "block_structure": None, "actorder": None},
    }
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    inputs |= {"symmetric": True, "group_size": None, "observer": None, "observer_kwargs": {}}
    return Format(_compressed_config("pack-quantized", weights, inputs if rounds else None), write)


def float8_channel() -> Format:
    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
        values = (weight / scale.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
        meant = values.astype(np.float32) * scale.astype(np.float32)
        return {"weight": values, "weight_scale": scale}, meant

    shared = {"num_bits": 8, "type": "float", "symmetric": True, "observer_kwargs": {}}
    weights = {**shared, "strategy": "channel", "dynamic": False, "group_size": None}
    inputs = {**shared, "strategy": "token", "dynamic": True, "group_size": None}
    return Format(_compressed_config("float-quantized", weights, inputs), write)


def float8_blocks(scales: str = "weight_scale_inv", dtype: Any = np.float32) -> Format:
    """``scales``: what they are called. Those of ``dtype`` E8M0 are powers of two."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale = np.empty((rows, columns), dtype)
        values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
        meant = np.empty_like(weight)
        for row in range(rows):
            for column in range(columns):
                block = np.s_[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
                least = np.abs(weight[block]).max() / 448
                if dtype == ml_dtypes.float8_e8m0fnu:
                    least = 2.0 ** np.ceil(np.log2(least))
                scale[row, column] = least
                step = scale[row, column].astype(np.float32)
                values[block] = np.clip(weight[block] / step, -448, 448).astype(values.dtype)
                meant[block] = values[block].astype(np.float32) * step
        return {"weight": values, scales: scale}, meant

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format({**config, "weight_block_size": [128, 128]}, write)


def compressed_blocks() -> Format:
    """compressed-tensors' float-quantized in blocks: llm-compressor's FP8_BLOCK."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = weights | {"dynamic": True, "strategy": "group", "group_size": 128}
    weights |= {"strategy": "block", "block_structure": [128, 128], "group_size": None}
    config = _compressed_config("float-quantized", weights, inputs)
    return Format(config, float8_blocks("weight_scale").write)


def float8_static() -> Format:
    """A scale for each module, and one for its inputs: as Mistral has it."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        scale = np.float32(np.abs(weight).max() / 448).astype(ml_dtypes.bfloat16)
        values = (weight / scale.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
        inputs = np.array(rng.uniform(0.02, 0.03), np.float32)
        tensors = {"weight": values, "weight_scale_inv": scale, "activation_scale": inputs}
        return tensors, values.astype(np.float32) * scale.astype(np.float32)

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return Format(config, write)


def modelopt_float8() -> Format:
    """ModelOpt's FP8: the same numbers, under other names."""
    of_mistral = float8_static()

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        parts, meant = of_mistral.write(weight, rng)
        scale = parts["weight_scale_inv"].astype(np.float32)
        inputs = parts["activation_scale"]
        return {"weight": parts["weight"], "weight_scale": scale, "input_scale": inputs}, meant

    return Format({"quant_method": "modelopt", "quant_algo": "FP8"}, write)


def mxfp8() -> Format:
    """compressed-tensors' mxfp8-quantized: a power of two for 32 inputs."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = weight.reshape(len(weight), -1, 32)
        largest = np.abs(groups).max(-1) + 1e-9
        stored = (127 + np.ceil(np.log2(largest / 448))).astype(np.uint8)
        scale = np.exp2(stored.astype(np.float32) - 127)[..., None]
        values = (groups / scale).astype(ml_dtypes.float8_e4m3fn)
        meant = (values.astype(np.float32) * scale).reshape(weight.shape)
        return {"weight": values.reshape(weight.shape), "weight_scale": stored}, meant

    shared = {"num_bits": 8, "type": "float", "symmetric": True, "observer_kwargs": {}}
    shared |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    inputs = {**shared, "dynamic": True}
    return Format(
        _compressed_config("mxfp8-quantized", {**shared, "dynamic": False}, inputs), write
    )


def mxfp8_by_name() -> Format:
    """The same as ``quant_method: mxfp8`` has it."""
    compressed_form = mxfp8()

    def write(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        parts, meant = compressed_form.write(weight, rng)
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, meant

    said = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format(said | {"scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, write)


def _compressed_config(name: str, weights: Any, inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


FORMATS = {
    "awq": awq(),
    "gptq": gptq(),
    "gptq v2, zeros": gptq(version=2, symmetric=False),
    "gptq act-order": gptq(ordered=True, symmetric=False),
    "gptq 8 bits, channels": gptq(8, -1),
    "compressed": compressed(),
    "compressed, zeros": compressed(symmetric=False),
    "compressed 8 bits, channels": compressed(8, None),
    "compressed, rounded inputs": compressed(rounds=True),
    "compressed act-order, rounded inputs": compressed(rounds=True, ordered=True),
    "float8": float8_channel(),
    "float8 blocks": float8_blocks(),
    "float8 static": float8_static(),
    "mxfp8": mxfp8(),
}


def quantize_checkpoint(
    source: Path,
    folder: Path,
    form: Format,
    quantizes: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
) -> tuple[Path, Path]:
    """Two copies of a checkpoint: quantized, and with the dense weights that the first one means.

    ``quantizes``: whether a tensor is, by its name.
    """
    rng = np.random.default_rng(0)
    quantized: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not quantizes(name):
            quantized[name] = meant[name] = tensor
            continue
        tensors, meant[name] = form.write(tensor.astype(np.float32), rng)
        stem = name.removesuffix("weight")
        # A bias of the model stays; one that it does not have is written as zeros.
        quantized |= {f"{stem}{suffix}": own for suffix, own in tensors.items()}
    config = json.loads((source / "config.json").read_text())
    own = config | {"quantization_config": with_list(form.config, quantized)}
    return write(folder / "quantized", quantized, own), write(folder / "dense", meant, config)


def with_list(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """A ``quantization_config`` that names the matrices which are not quantized, if it has a list
    of them."""
    if not config.get("ignore"):
        return config
    floats = (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16))
    plain = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2 and tensor.dtype in floats
    ]
    return config | {"ignore": [*config["ignore"], *plain]}


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """A checkpoint directory of these tensors. Through torch: safetensors does not write 8-bit
    floats of NumPy."""
    folder.mkdir(parents=True)
    save_file(
        {name: of_torch(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_torch(tensor: np.ndarray) -> torch.Tensor:
    tensor = np.array(tensor, order="C")  # np.ascontiguousarray would give numbers a dimension
    for dtype, bits, own in (
        (ml_dtypes.float8_e4m3fn, np.uint8, torch.float8_e4m3fn),
        (ml_dtypes.float8_e8m0fnu, np.uint8, torch.float8_e8m0fnu),
        (ml_dtypes.bfloat16, np.int16, torch.bfloat16),
    ):
        if tensor.dtype == dtype:
            return torch.from_numpy(np.asarray(tensor.view(bits))).view(own)
    return torch.from_numpy(tensor)
