"""The directory of a model's files: a local one, or one downloaded from the Hugging Face hub."""

from pathlib import Path

import huggingface_hub  # which loads the rest of itself when it is asked for

FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt")


def resolve_directory(name_or_path: str | Path) -> Path:
    """An existing directory, or that of a hub repository, which is downloaded if necessary.

    Raises ValueError if there is no such directory, or the download fails.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"no directory {name}: give a model directory or a hub id, owner/name")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the hub client raises many types, some of its HTTP library
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name} is not a directory here, and the Hugging Face hub does not give it: {reason}"
        ) from error
