"""Files of what `jaxspec bench drafters --json` printed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxspec.commands.shared.shell import read_text

CHOICES = ("prompt_tokens", "max_tokens", "top_p", "acceptance", "verify_width", "seed")


def read_parts(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What runs printed. Raises ValueError for another file, and for runs of different models,
    devices or lengths."""
    parts = [part for path in paths for part in parts_of(path)]
    for name in ("model", "dtype", "device", *CHOICES):
        values = list(dict.fromkeys(part.get(name) for part in parts))
        if len(values) > 1:
            raise ValueError(f"the runs do not belong together: {name} is {values[0]}, {values[1]}")
    return parts


def parts_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file. Raises ValueError for another file."""
    try:
        parts = [json.loads(line) for line in read_text(path).splitlines()]
    except json.JSONDecodeError as error:
        raise ValueError(f"cannot read {path} as lines of JSON: {error}") from error
    of_this_command = "target_token_bytes"  # other commands' have rows, too
    if not parts or not all(isinstance(part, dict) and of_this_command in part for part in parts):
        raise ValueError(f"{path} is not of bench_drafters.py --json")
    if not all("speedup_interval" in row for part in parts for row in part["rows"]):
        raise ValueError(
            f"{path} is of an older bench_drafters.py, without intervals: run it again"
        )
    return parts
