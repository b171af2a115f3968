"""Files of scales for 8-bit caches: a scale for each KV head of every layer, as JSON.

    {"format": "jaxspec-kv-scales-1", "target": [{"k": [0.01, ...], "v": [...]}, ...],
     "drafter": [...], ...}

``target`` and ``drafter`` have one entry for each attention layer, in order; the drafter's may be
empty. Other fields say how the scales were made, and are not read.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.cache import KVScales
from jaxspec.models.json.values import read_json, shown

FORMAT = "jaxspec-kv-scales-1"
PARTS = ("target", "drafter")


@dataclasses.dataclass(frozen=True)
class KVScaleFile:
    """Scales of the layers of a target and of its drafter, float32 [G] each."""

    target: tuple[KVScales, ...]
    drafter: tuple[KVScales, ...] = ()

    def write(self, path: Path, **about: Any) -> None:
        """``about``: further fields."""
        parts = {
            name: [
                {"k": _numbers(layer_scales.k), "v": _numbers(layer_scales.v)}
                for layer_scales in getattr(self, name)
            ]
            for name in PARTS
        }
        path.write_text(json.dumps({"format": FORMAT, **about, **parts}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> "KVScaleFile":
        """Raises ValueError that names the field for a file that is none of these."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"kv_scales: there is no file {path}")
        content = read_json(path)
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ValueError(f'{path} is no file of scales: its format must be "{FORMAT}"')
        return cls(*(_layers(path, name, content.get(name, [])) for name in PARTS))


def _layers(path: Path, name: str, entries: Any) -> tuple[KVScales, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f"{path}: {name} must be a list of layers, got {shown(entries)}")
    return tuple(_scales(path, f"{name}[{i}]", entry) for i, entry in enumerate(entries))


def _scales(path: Path, name: str, entry: Any) -> KVScales:
    found: dict[str, Any] = {}
    for field in ("k", "v"):
        values = entry.get(field) if isinstance(entry, Mapping) else None
        try:
            array = np.asarray(values, np.float32)
        except (TypeError, ValueError):
            array = np.zeros(0, np.float32)
        if array.ndim != 1 or not array.size or not (np.isfinite(array) & (array > 0)).all():
            raise ValueError(
                f"{path}: {name}.{field} must be a list of finite numbers above 0, got "
                f"{shown(values)}"
            )
        found[field] = array
    return KVScales(**found)


def _numbers(scale: Any) -> list[float]:
    return [float(number) for number in np.asarray(scale)]
