"""Which directories are snapshots of pytrees; orbax_io.py writes and reads them."""

from pathlib import Path

CHOICES = "jaxspec_choices.json"  # the values of the tree's static fields


def is_snapshot(directory: str | Path) -> bool:
    """Whether orbax_io.save_pytree has written this directory."""
    return (Path(directory) / CHOICES).is_file()
