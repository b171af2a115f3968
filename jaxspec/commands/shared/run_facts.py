"""What the records of a run say of the run itself."""

import dataclasses
import datetime
import os
import subprocess
from pathlib import Path
from typing import Any

import jax

from jaxspec.commands.shared.shell import typed_command
from jaxspec.config.model import LayerConfig, ModelConfig

ROOT = Path(__file__).resolve().parents[3]  # the folder that contains the package


def run_facts() -> dict[str, str]:
    """Date, command, commit if it is known, jax version and device, for the records of a run."""
    commit = source_commit()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": typed_command(),
        **({} if commit is None else {"commit": commit}),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def config_facts(config: ModelConfig) -> dict[str, Any]:
    """A model's config for JSON: equal layers stand there once, with the ``indices`` they have."""
    indices: dict[LayerConfig, list[int]] = {}
    for index, layer in enumerate(config.layers):
        indices.setdefault(layer, []).append(index)
    layers = [dataclasses.asdict(layer) | {"indices": at} for layer, at in indices.items()]
    return dataclasses.asdict(config) | {"layers": layers}


def source_commit(root: Path = ROOT) -> str | None:
    """The git commit of the checkout ``root``, with ``-dirty`` if tracked files have changed since;
    None: it is no checkout, or git cannot tell. JAXSPEC_COMMIT says it for a copy elsewhere."""
    if given := os.environ.get("JAXSPEC_COMMIT"):
        return given
    if not (root / ".git").exists():  # an installed package may lie in somebody else's checkout
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        result = subprocess.run(
            [*command, "--dirty"], cwd=root, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
