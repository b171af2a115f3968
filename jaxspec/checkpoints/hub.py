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
        raise ValueError(
            f"{name} is not a directory here, and the Hugging Face hub does not give it: "
            f"{_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """What is wrong, and what helps, in a line."""
    errors = huggingface_hub.errors  # loaded by now: the client has raised an error
    if isinstance(error, errors.GatedRepoError):
        return "it is gated: ask for access on its page, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such repository, or it is private: check the spelling, or log in with "
            "`hf auth login`"
        )
    if isinstance(error, errors.HFValidationError):
        return "that is no hub id, owner/name"
    reason = " ".join(str(error).split())
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "the hub cannot be reached, and no download of it is in the cache. Check the name and "
            f"the network, or give the directory of a copy ({reason.partition(' An error')[0]})"
        )
    return reason
