"""What a GGUF file says: its fields, and where its tensors lie. Read with the package ``gguf``."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec._lazy import LazyModule

gguf: Any = LazyModule("gguf")

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_INSTALL = 'GGUF files are read with the package gguf: pip install "jaxspec-decoding[gguf]"'


class StoredBlocks(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
      file: index into ``Metadata.files``.
      offset: of its first byte in the file.
      kind: the name that llama.cpp has for its type, such as Q4_K.
      shape: outputs first, as in safetensors.
    """

    file: int
    offset: int
    kind: str
    shape: tuple[int, ...]


class Metadata(NamedTuple):
    """All fields of a model's first file, and the tensors of all of its files."""

    files: tuple[Path, ...]
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredBlocks]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the architecture, such as ``block_count``."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def token_field(self, key: str, default: Any = None) -> Any:
        """A field of the tokenizer, such as ``tokens``."""
        return self.fields.get(f"tokenizer.ggml.{key}", default)


def read_metadata(path: Path) -> Metadata:
    """The metadata of a model: of one file, or of the shards beside it.

    Raises ValueError without the package ``gguf``, for a file that is broken, and for shards that
    are missing.
    """
    files = shards_of(path)
    fields: dict[str, Any] = {}
    tensors: dict[str, StoredBlocks] = {}
    for index, file in enumerate(files):
        reader = _open(file)
        if index == 0:
            fields = {name: field.contents() for name, field in reader.fields.items()}
        for tensor in reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            kind = tensor.tensor_type.name
            tensors[tensor.name] = StoredBlocks(index, int(tensor.data_offset), kind, shape)
    return Metadata(files, fields, tensors)


def shards_of(path: Path) -> tuple[Path, ...]:
    """The files of the model that ``path`` belongs to. Raises ValueError if one is missing."""
    if not (match := _SHARD.fullmatch(path.name)):
        return (path,)
    stem, _, count = match.groups()
    names = [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]
    files = tuple(path.with_name(name) for name in names)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{path} is one of {count} files, of which are missing: {', '.join(missing)}"
        )
    return files


def _open(path: Path) -> Any:
    try:
        reader = gguf.GGUFReader
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ValueError(_INSTALL) from None
    try:
        return reader(path)
    except Exception as error:  # NumPy's and struct's, of files that are cut short
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a readable GGUF file: {reason}") from None
