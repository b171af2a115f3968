"""Where files are kept that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``jaxspec`` in the user's cache directory: ``$XDG_CACHE_HOME`` if that is an absolute path,
    else ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "jaxspec"
