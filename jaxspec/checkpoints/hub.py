"""The directory of a model's files: a local one, one downloaded from the Hugging Face hub, or one
that leads to a GGUF file."""

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub  # which loads the rest of itself when it is asked for

from jaxspec._lazy import LazyModule
from jaxspec.checkpoints.packaged import PACKAGED, packaged_file

gguf_folder = LazyModule("jaxspec.checkpoints.gguf.folder")

FILES = (
    *("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt"),
    "mask_embedding.pt",  # of MiMo's block heads
)


def resolve_directory(name_or_path: str | Path) -> Path:
    """An existing directory, or that of a hub repository, which is downloaded if necessary. Of a
    GGUF file (a path, owner/name/FILE.gguf of the hub, or a name in PACKAGED), the folder that
    leads to it.

    Raises ValueError if there is no such directory or file, or the download fails.
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.is_dir():
        return path
    if name in PACKAGED:
        path = packaged_file(name)
    if path.suffix == ".gguf":
        return gguf_folder.folder_of(path if path.is_file() else _downloaded_file(name))
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"no directory {name}: give a model directory or a hub id, owner/name")
    return _downloaded(name, name, "directory", FILES)


def _downloaded_file(name: str) -> Path:
    """A GGUF file of the hub, with its shards."""
    if name.startswith(("/", ".", "~")) or name.count("/") < 2:
        raise ValueError(f"no file {name}: give a GGUF file, or one of the hub, owner/name/FILE")
    owner, repository, file = name.split("/", 2)
    shards = [re.sub(r"-\d{5}-of-", "-?????-of-", file)]
    return _downloaded(f"{owner}/{repository}", name, "file", shards) / file


def _downloaded(repository: str, name: str, kind: str, patterns: Sequence[str]) -> Path:
    """The directory of a hub repository, with the files that fit a pattern."""
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many types, some of its HTTP library
        raise ValueError(
            f"{name} is not a {kind} here, and the Hugging Face hub does not give it: "
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
