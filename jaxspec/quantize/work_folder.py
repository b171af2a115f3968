"""A run on disk: what is done of it, so that a run that was killed goes on."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxspec.models.quantized.float8 import E4M3
from jaxspec.quantize.methods import QuantizedLayer
from jaxspec.quantize.rounding import Rounded

STATE = "state.json"


class WorkFolder:
    """The folder ``directory``: a file for each finished unit, and what the run is.

    Args:
      fingerprint: JSON values that must be the same in a run that goes on.

    Raises ValueError if the folder holds another run.
    """

    def __init__(self, directory: Path, fingerprint: dict[str, Any]):
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path, wanted = directory / STATE, json.loads(json.dumps(fingerprint))
        if path.exists():
            found = json.loads(path.read_text())
            names = sorted({*found, *wanted})
            differing = [name for name in names if found.get(name) != wanted.get(name)]
            if differing:
                raise ValueError(
                    f"{directory} holds another run, which differs in {', '.join(differing)}: "
                    "choose another folder, or delete it"
                )
        else:
            _write(
                path, lambda temporary: temporary.write_text(json.dumps(wanted, indent=2) + "\n")
            )

    def has(self, index: int) -> bool:
        return self._path(index).exists()

    def save(self, index: int, unit: QuantizedLayer) -> None:
        """Write what became of a unit. The file is there once it is whole."""
        changed, projections = jax.device_get((unit.changed, unit.projections))
        tensors: dict[str, np.ndarray] = {f"changed.{name}": x for name, x in changed.items()}
        for name, rounded in projections.items():
            for field, array in rounded._asdict().items():
                if array is not None:
                    # Safetensors writes 8-bit floats of NumPy, but reads none: bytes are kept.
                    array = np.ascontiguousarray(array)
                    as_bytes = array.dtype == E4M3
                    tensors[f"{field}.{name}"] = array.view(np.uint8) if as_bytes else array
        metadata = {"errors": json.dumps(unit.errors)}
        _write(self._path(index), lambda path: save_file(tensors, path, metadata=metadata))

    def load(self, index: int) -> QuantizedLayer:
        """What ``save`` was given, as NumPy arrays."""
        parts: dict[str, dict[str, Any]] = {}
        for name, array in load_file(self._path(index)).items():
            kind, _, key = name.partition(".")
            array = array.view(E4M3) if array.dtype == np.uint8 else array
            parts.setdefault(kind, {})[key] = array
        with safe_open(self._path(index), framework="numpy") as file:
            errors = json.loads(file.metadata()["errors"])
        zeros: dict[str, Any] = parts.get("zero", {})
        groups: dict[str, Any] = parts.get("groups", {})
        projections = {
            name: Rounded(values, parts["scale"][name], zeros.get(name), groups.get(name))
            for name, values in parts["values"].items()
        }
        return QuantizedLayer(projections, parts.get("changed", {}), errors)

    def delete(self) -> None:
        """Remove the run's files, and the folder if nothing else is in it."""
        for path in [*self._directory.glob("unit-*.safetensors"), self._directory / STATE]:
            path.unlink()
        if not any(self._directory.iterdir()):
            self._directory.rmdir()

    def _path(self, index: int) -> Path:
        return self._directory / f"unit-{index:05}.safetensors"


def _write(path: Path, write: Any) -> None:
    """Write a file by ``write(temporary path)``; under ``path`` it is whole, or not there."""
    temporary = path.with_name(f"{path.name}.tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
