"""The folder in which compiled programs are stored between runs (jax's compilation cache)."""

import argparse
import os
import sys
from pathlib import Path

import jax

from jaxspec.checkpoints.cache_folder import cache_folder


def default_folder() -> Path:
    """``$JAX_COMPILATION_CACHE_DIR``, else ``compilation`` in the folder of cached files."""
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(folder)
    return cache_folder() / "compilation"


def make_folder(folder: Path) -> Path:
    """Create the folder if necessary. Raises ValueError if it cannot be written."""
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot keep compiled programs: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"cannot keep compiled programs: no permission to write to {folder}")
    return folder


def program_folder(arguments: argparse.Namespace) -> Path | None:
    """The folder of compiled programs, by engine_options.add_program_options; None: they are not
    stored.

    Raises ValueError if the folder that was asked for cannot be written. If that is the default
    folder, a message is printed instead.
    """
    if arguments.no_compilation_cache:
        return None
    if arguments.compilation_cache is not None:
        return make_folder(arguments.compilation_cache)
    try:
        return make_folder(default_folder())
    except ValueError as error:
        print(f"{error}; going on without", file=sys.stderr)
        return None


def keep_compiled_programs(folder: Path | None) -> None:
    """Read compiled programs from a folder, and store new ones in it; None: no folder."""
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
