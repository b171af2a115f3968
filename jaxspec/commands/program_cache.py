"""The folder in which compiled programs are stored between runs (jax's compilation cache)."""

import os
from pathlib import Path

import jax


def default_folder() -> Path:
    """``$JAX_COMPILATION_CACHE_DIR``, else ``jaxspec/compilation`` in the user's cache directory.

    That directory is ``$XDG_CACHE_HOME`` if it is an absolute path, else ``~/.cache``.
    """
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "jaxspec" / "compilation"


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


def keep_compiled_programs(folder: Path | None) -> None:
    """Read compiled programs from a folder, and store new ones in it; None: no folder."""
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
