"""A folder for a GGUF file, with the files of a Hugging Face checkpoint that lead to it.

It lies in the user's cache directory, so that the file is converted once: config.json,
tokenizer.json, tokenizer_config.json, and tensors.json, which says where each tensor lies. Weights
stay in the GGUF file.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec._version import __version__
from jaxspec.checkpoints.cache_folder import cache_folder
from jaxspec.checkpoints.gguf.config import config_of
from jaxspec.checkpoints.gguf.metadata import Metadata, read_metadata, shards_of
from jaxspec.checkpoints.gguf.names import named_tensors
from jaxspec.checkpoints.gguf.tensors import WidenedTensor
from jaxspec.checkpoints.gguf.tokenizer import tokenizer_files
from jaxspec.models.json.values import naming, read_json

TENSORS = "tensors.json"
_CONTENTS = 2  # another number when files are written otherwise: folders of before are not read


def folder_of(path: Path) -> Path:
    """The folder of a GGUF file, made if it is new or the file has changed.

    Raises ValueError for a file that is broken or not supported.
    """
    path = path.absolute()  # the hub's cache has links, whose targets have other names
    facts = [[str(file), *_state(file)] for file in shards_of(path)]
    key = hashlib.sha256(json.dumps([__version__, _CONTENTS, facts]).encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if not (folder / TENSORS).exists():
        metadata = read_metadata(path)
        with naming(str(path)):
            _write(folder, metadata)
    return folder


def _state(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_size, state.st_mtime_ns


def _write(folder: Path, metadata: Metadata) -> None:
    """Write all files, then give the folder its name: another process may do the same."""
    contents: Mapping[str, Any] = {
        "config.json": config_of(metadata),
        **tokenizer_files(metadata),
        TENSORS: _tensors(metadata),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        inside = Path(made) / folder.name
        inside.mkdir()
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1)
            (inside / name).write_text(text)
        if not folder.exists():
            os.replace(inside, folder)


def _tensors(metadata: Metadata) -> dict[str, Any]:
    return {
        name: {
            "file": str(metadata.files[named.blocks.file]),
            "shape": named.blocks.shape,
            "offset": named.blocks.offset,
            "kind": named.blocks.kind,
            "heads": named.heads,
            "shift": named.shift,
        }
        for name, named in named_tensors(metadata).items()
    }


def tensors_in(folder: Path) -> dict[str, WidenedTensor]:
    """The tensors of a folder that ``folder_of`` made."""
    return {
        name: WidenedTensor(Path(entry.pop("file")), name, tuple(entry.pop("shape")), **entry)
        for name, entry in read_json(folder / TENSORS).items()
    }
