"""Writes quantized checkpoints in the formats that others read, too (see checkpoints/formats/)."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from jaxspec._version import __version__
from jaxspec.checkpoints.formats.awq import ORDER
from jaxspec.checkpoints.formats.packing import pack, per_word
from jaxspec.checkpoints.safetensors_io import save_parts
from jaxspec.quantize.gptq import GptqConfig
from jaxspec.quantize.methods import Method
from jaxspec.quantize.rounding import Grid, Rounded

FormatName = Literal["awq", "gptq", "compressed-tensors", "dense"]
Activations = Literal["fp8"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
SMALLEST_POWER, LARGEST_POWER = 3, 8  # of 2: groups that errors propose
MAX_FILE_BYTES = 1 << 30  # of tensors, which are held until their file is full
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt")
NOT_COPIED = (*WEIGHTS, "config.json", "README.md", "*.png", "*.jsonl", "*.gguf", ".*")
Named = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class QuantizationPlan:
    """What is done to a checkpoint.

    Attributes:
      grid: without meaning for fp8.
      lm_head: whether the LM head is quantized.
      activations: what readers round integer weights' inputs to; None: they stay as they are. It
        changes what config.json says, no weight.
    """

    method: Method
    grid: Grid
    gptq: GptqConfig
    format: FormatName
    lm_head: bool
    activations: Activations | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether groups are of inputs in another order than theirs."""
        return self.method == "gptq" and self.gptq.order == "mixed" and self.grid.group is not None


def check_plan(plan: QuantizationPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for what a format cannot hold; ``shapes`` are [out, in] of projections."""
    grid, name = plan.grid, plan.format
    if plan.activations is not None:
        _check_activations(plan)
    if plan.method == "fp8":
        if name not in ("compressed-tensors", "dense"):
            raise ValueError(f"format {name} has no 8-bit floats: take compressed-tensors")
        return
    allowed = {"awq": (4,), "gptq": (4, 8), "compressed-tensors": (4, 8), "dense": range(2, 9)}
    if grid.bits not in allowed[name]:
        bits = " or ".join(map(str, allowed[name]))
        raise ValueError(
            f"format {name} holds {bits} bits, not {grid.bits}; dense holds what 2 to 8 bits mean"
        )
    if name in ("awq", "compressed-tensors") and plan.is_mixed:
        raise ValueError(f"format {name} has no mixed groups: take --order static, or format gptq")
    if name == "awq" and plan.lm_head:
        raise ValueError("format awq leaves the LM head as it is: no --lm-head, or another format")
    _check_groups(grid, {module: size for module, (_, size) in shapes.items()})
    for module, (outputs, size) in shapes.items():
        packed = {"awq": outputs, "gptq": math.gcd(outputs, size)}.get(name, 0)
        if packed % per_word(grid.bits):  # other formats fill the last word
            raise ValueError(
                f"{module} is [{outputs}, {size}]: format {name} packs {per_word(grid.bits)} "
                f"integers of {grid.bits} bits into a word, which must divide"
            )


def _check_groups(grid: Grid, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless groups divide the inputs of all modules: it names the first module
    of each size, and groups that do."""
    problems: dict[int, str] = {}
    for module, size in sizes.items():
        try:
            grid.num_groups(size)
        except ValueError as error:
            problems.setdefault(size, f"{module}: {error}")
    if problems:
        shared = math.gcd(*sizes.values())
        powers = [2**power for power in range(LARGEST_POWER, SMALLEST_POWER - 1, -1)]
        groups = [str(group) for group in powers if shared % group == 0]
        raise ValueError(
            f"{'; '.join(problems.values())}. Groups that divide all inputs: "
            f"{', '.join([*groups, '-1 (all of them)'])}"
        )


def _check_activations(plan: QuantizationPlan) -> None:
    """Raise ValueError unless files can say that inputs are rounded."""
    if plan.method == "fp8":
        raise ValueError("method fp8 rounds activations by itself: no --activations")
    if plan.format != "compressed-tensors":
        raise ValueError(
            f"format {plan.format} has no rounded activations: take --format compressed-tensors"
        )
    if plan.grid.bits != 4 or not plan.grid.symmetric:
        raise ValueError(
            "rounded activations need symmetric weights of 4 bits: take --bits 4 --symmetric"
        )


def awq_tensors(rounded: Rounded, plan: QuantizationPlan) -> Named:
    half = -plan.grid.lowest
    return {
        "qweight": pack(_wide(rounded.values).T + half, 4, 1, ORDER),
        "qzeros": pack(_zeros(rounded).T + half, 4, 1, ORDER),
        "scales": np.ascontiguousarray(np.asarray(rounded.scale).T),
    }


def gptq_tensors(rounded: Rounded, plan: QuantizationPlan) -> Named:
    """Version 1: a stored zero is 1 less, and 0 becomes the largest."""
    bits, half = plan.grid.bits, -plan.grid.lowest
    size, groups = rounded.values.shape[1], rounded.scale.shape[1]
    index = np.arange(size) // (size // groups) if rounded.groups is None else rounded.groups
    return {
        "qweight": pack(_wide(rounded.values).T + half, bits, 0),
        "qzeros": pack((_zeros(rounded).T + half - 1) % 2**bits, bits, 1),
        "scales": np.ascontiguousarray(np.asarray(rounded.scale).T),
        "g_idx": np.asarray(index, np.int32),
    }


def compressed_tensors(rounded: Rounded, plan: QuantizationPlan) -> Named:
    scale = np.asarray(rounded.scale)
    if plan.method == "fp8":
        return {"weight": np.asarray(rounded.values), "weight_scale": scale}
    bits, half = plan.grid.bits, -plan.grid.lowest
    tensors: Named = {
        "weight_packed": pack(_wide(rounded.values) + half, bits, 1),
        "weight_scale": scale,
        "weight_shape": np.array(rounded.values.shape, np.int64),
    }
    if rounded.zero is not None:
        tensors["weight_zero_point"] = pack(_zeros(rounded) + half, bits, 0)
    return tensors


def dense_tensors(rounded: Rounded, plan: QuantizationPlan) -> Named:
    """Float32, whatever the dtype of the other weights: every value is exact."""
    return {"weight": np.asarray(rounded.dense())}


TENSORS: Mapping[FormatName, Callable[[Rounded, QuantizationPlan], Named]] = MappingProxyType(
    {
        "awq": awq_tensors,
        "gptq": gptq_tensors,
        "compressed-tensors": compressed_tensors,
        "dense": dense_tensors,
    }
)


def quantization_config(plan: QuantizationPlan) -> dict[str, Any] | None:
    """What config.json says of a format; None for dense weights."""
    grid, group = plan.grid, -1 if plan.grid.group is None else plan.grid.group
    match plan.format:
        case "dense":
            return None
        case "awq":
            return {
                "quant_method": "awq",
                "version": "gemm",
                "bits": grid.bits,
                "group_size": group,
                "zero_point": True,
                "modules_to_not_convert": None,
            }
        case "gptq":
            return {
                "quant_method": "gptq",
                "checkpoint_format": "gptq",
                "bits": grid.bits,
                "group_size": group,
                "sym": grid.symmetric,
                "desc_act": plan.is_mixed,
                "static_groups": plan.method == "gptq" and plan.gptq.order == "static",
                "true_sequential": True,
                "damp_percent": plan.gptq.damping,
                "lm_head": plan.lm_head,
                "pack_dtype": "int32",
                "meta": {"quantizer": [f"jaxspec:{__version__}"]},
            }
    return _compressed_config(plan)


def _compressed_config(plan: QuantizationPlan) -> dict[str, Any]:
    is_float, grid = plan.method == "fp8", plan.grid
    grouped = not is_float and grid.group is not None
    weights: dict[str, Any] = {
        "num_bits": 8 if is_float else grid.bits,
        "type": "float" if is_float else "int",
        "symmetric": is_float or grid.symmetric,
        "strategy": "group" if grouped else "channel",
        "group_size": grid.group if grouped else None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    inputs = None
    if is_float or plan.activations == "fp8":
        inputs = weights | {"num_bits": 8, "type": "float", "strategy": "token"}
        inputs |= {"dynamic": True, "observer": None, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    if plan.activations is not None:  # else compressed-tensors 0.20 expects unpacked integers
        group["format"] = "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [] if plan.lm_head else ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def module_tensors(module: str, rounded: Rounded, plan: QuantizationPlan) -> Named:
    """The tensors of one quantized projection, by their whole names."""
    tensors = TENSORS[plan.format](rounded, plan)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def write_checkpoint(
    source: Path,
    raw: Mapping[str, Any],
    tensors: Iterable[Named],
    plan: QuantizationPlan,
    out: Path,
) -> None:
    """Write a directory: tensors in files of at most about MAX_FILE_BYTES, a copy of everything in
    ``source`` that is no weight (the tokenizer), and config.json, which comes last.

    ``tensors`` are read as they are written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in NOT_COPIED):
            shutil.copyfile(path, out / path.name)
    save_parts(out, _filled(tensors))
    config = dict(raw)
    if (quantization := quantization_config(plan)) is not None:
        config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _filled(tensors: Iterable[Named]) -> Iterator[Named]:
    """The tensors, in dicts of about MAX_FILE_BYTES."""
    part: Named = {}
    for tensors_of_unit in tensors:
        total = sum(x.nbytes for named in (part, tensors_of_unit) for x in named.values())
        if part and total > MAX_FILE_BYTES:
            yield part
            part = {}
        part |= tensors_of_unit
    if part:
        yield part


def _wide(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.int32)


def _zeros(rounded: Rounded) -> np.ndarray:
    """[out, n]"""
    shape = rounded.scale.shape
    return np.zeros(shape, np.int32) if rounded.zero is None else _wide(rounded.zero)
