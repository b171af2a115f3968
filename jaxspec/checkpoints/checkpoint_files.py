"""The tensors of a checkpoint directory: which there are, and reading slices of them."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec._lazy import LazyModule
from jaxspec.checkpoints.formats import canonical, named_quantization
from jaxspec.checkpoints.tensor_names import named
from jaxspec.models.json.values import naming, one_line, read_json, shown, shown_name
from jaxspec.models.tensors import CheckpointTensor

gguf_folder = LazyModule("jaxspec.checkpoints.gguf.folder")

# What the bytes of safetensors' dtypes are read as. Those of E8M0 are exponents: 2^(byte - 127).
DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
        **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
        **{"U8": np.dtype(np.uint8), "BOOL": np.dtype(bool)},
        **{"BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)},
        "F8_E8M0": np.dtype(np.uint8),
    }
)

# Ends of the names of packed tensors (8-bit floats are told by their dtype), and files in which
# quantizers say how they packed them, where config.json does not: AutoGPTQ's, AutoAWQ's and
# ModelOpt's, with what the file itself implies.
OF_PACKED = (".qweight", ".weight_packed", ".weight_scale_2")
FLOAT8 = "F8_E4M3"
QUANTIZERS_FILES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "quantize_config.json": {"quant_method": "gptq"},
        "quant_config.json": {"quant_method": "awq"},
        "hf_quant_config.json": {"quant_method": "modelopt"},
    }
)

# Converts pickled weights: all shards into one file. It clones, as tied tensors share memory, which
# safetensors refuses.
CONVERSION = (
    "import glob, torch, safetensors.torch as s; "
    'tensors = {k: v.clone().contiguous() for f in glob.glob("*model*.bin") '
    'for k, v in torch.load(f, map_location="cpu", weights_only=True).items()}; '
    's.save_file(tensors, "model.safetensors", {"format": "pt"})'
)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its file, name, shape, and dtype as safetensors names it.

    ``start``: of its bytes in the file. Files of experts have thousands of tensors, so a header is
    read once, not for each of them.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    def read(self, *index: slice) -> np.ndarray:
        """The slice at ``index``. The file is mapped as long as the result is there.

        Raises ValueError for a dtype that is not read, and for a file that has become shorter.
        """
        if (kind := DTYPES.get(self.dtype)) is None:
            raise ValueError(f"{self.file}: {self.name} has unsupported dtype {self.dtype}")
        if 0 in self.shape:
            return np.empty(self.shape, kind)[index or ...]
        mapped = np.memmap(self.file, kind, "r", self.start, self.shape)
        return np.asarray(mapped[index or ...])


def as_vector(tensor: CheckpointTensor) -> CheckpointTensor:
    """A stored tensor [1, ..., C] as [C]; any other as it is."""
    if not isinstance(tensor, StoredTensor) or math.prod(tensor.shape[:-1]) != 1:
        return tensor
    return dataclasses.replace(tensor, shape=tensor.shape[-1:])


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        reason = one_line(error)
        raise ValueError(f"{path} is not a readable safetensors file: {reason}") from None


def scan(directory: str | Path) -> dict[str, CheckpointTensor]:
    """All tensors of a checkpoint directory, by name. Only the file headers are read.

    They have the names of the model's layers (see tensor_names). Of a folder that was made for a
    GGUF file, the tensors of that.

    Raises ValueError for files that are missing, broken, or do not belong together.
    """
    if (Path(directory) / gguf_folder.TENSORS).exists():
        return gguf_folder.tensors_in(Path(directory))
    stored: dict[str, CheckpointTensor] = {}
    for path in _checkpoint_files(Path(directory)):
        for tensor in _tensors_of(path):
            if (other := stored.get(tensor.name)) is not None:
                raise ValueError(
                    f"{other.file} and {path} both hold {shown_name(tensor.name)}: remove the file "
                    "that is not of this checkpoint"
                )
            stored[tensor.name] = tensor
    path = Path(directory) / "config.json"
    return named(stored, read_json(path) if path.exists() else {}, directory)


def _tensors_of(path: Path) -> list[StoredTensor]:
    """The tensors of a file, by its header."""
    with open_safetensors(path) as checked:
        names = list(checked.keys())
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))

    def tensor_of(name: str) -> StoredTensor:
        said = header[name]
        start = 8 + size + said["data_offsets"][0]
        return StoredTensor(path, name, tuple(said["shape"]), said["dtype"], start)

    return [tensor_of(name) for name in names]


def canonical_tensors(directory: str | Path) -> dict[str, CheckpointTensor]:
    """``scan``, where quantized modules have tensors of quantization.formats in place of their own.

    Raises ValueError for a quantization that is not supported.
    """
    stored = scan(directory)
    with naming(str(directory)):
        return canonical(quantization_of(Path(directory), stored), stored)


def quantization_of(
    directory: Path, stored: Mapping[str, CheckpointTensor]
) -> dict[str, Any] | None:
    """What a checkpoint says of its quantization; None: it is not quantized.

    ``stored``: its tensors. Packed ones without a word in config.json are of a quantizer that wrote
    a file beside it.

    Raises ValueError if no file says how tensors were packed, and for a value that is no object.
    """
    path = directory / "config.json"
    if (found := named_quantization(read_json(path) if path.exists() else {})) is not None:
        return found
    packed = next((name for name, tensor in stored.items() if _is_packed(name, tensor)), None)
    if packed is None:
        return None
    for file, implied in QUANTIZERS_FILES.items():
        if (directory / file).exists():
            return implied | read_json(directory / file)
    files = " or ".join(QUANTIZERS_FILES)
    raise ValueError(
        f"{shown_name(packed)} is packed, but config.json has no quantization_config, and there is "
        f"no {files} that says how: fetch that file from where the weights come from"
    )


def _is_packed(name: str, tensor: CheckpointTensor) -> bool:
    return name.endswith(OF_PACKED) or tensor.dtype == FLOAT8


def _checkpoint_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        files = _indexed_files(index)
        if single.exists() and single not in files:
            raise ValueError(
                f"{single} stands beside {index}, which names other files: two checkpoints are in "
                "one directory. Remove the one that is not meant"
            )
        return files
    if single.exists():
        if shards := sorted(directory.glob("model-*-of-*.safetensors")):
            raise ValueError(
                f"{single} stands beside {shards[0]}, which no index names: two checkpoints are in "
                "one directory. Remove the one that is not meant"
            )
        return [single]
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if any(directory.glob("*model*.bin")):
        raise ValueError(
            f"{directory} holds pickled weights (*model*.bin), which are not read. Convert them "
            f"where torch is installed: cd there and run python -c '{CONVERSION}'"
        )
    raise ValueError(
        f"no *.safetensors file in {directory}: is it a model directory? A hub repository that has "
        "only pickled weights (*.bin) must be downloaded whole (hf download OWNER/NAME --local-dir "
        "DIR) and converted: give DIR, and the error says how"
    )


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index names, all in its directory."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{index}: weight_map must map tensors to files, got {shown(files)}")
    for name in files.values():
        inside = isinstance(name, str) and name.isprintable() and ".." not in Path(name).parts
        if not inside or Path(name).is_absolute() or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index}: weight_map names {shown(name)}, which is no *.safetensors file inside "
                "the directory"
            )
    return sorted({index.parent / name for name in files.values()})
