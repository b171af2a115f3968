"""Model names to directories."""

import fnmatch
import re
import types
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from jaxspec.checkpoints import hub
from jaxspec.checkpoints.block import MASK_FILE
from jaxspec.checkpoints.hub import resolve_directory


def refuse(*_, **__):
    raise AssertionError("the hub was asked")


def test_an_existing_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)
    assert resolve_directory(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_directory("owner/name") == Path("owner/name")


@pytest.mark.parametrize("name", ["/no/such", "./missing", "../missing", "~/missing", "a/b/c"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=f"no directory {name}"):
        resolve_directory(name)


def test_a_file_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no directory"):
        resolve_directory(tmp_path / "file")


def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", download)
    assert resolve_directory("owner/name") == tmp_path
    assert "*.safetensors" in asked["owner/name"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["owner/name"])


def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def fail(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"owner/name is not a directory here.*no route to host"):
        resolve_directory("owner/name")


# What the hub client's errors read of an answer.
ANSWER: Any = types.SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.RepositoryNotFoundError("404: long", response=ANSWER), "check the spelling"),
        (errors.GatedRepoError("403: long", response=ANSWER), "it is gated: ask for access"),
        (errors.HFValidationError("Repo id must"), "that is no hub id, owner/name"),
        (errors.OfflineModeIsEnabled("offline"), "give the directory of a copy (offline)"),
        (
            errors.LocalEntryNotFoundError("Got: ConnectError: no name\nAn error happened while"),
            "the hub cannot be reached, and no download of it is in the cache. Check the name and "
            "the network, or give the directory of a copy (Got: ConnectError: no name)",
        ),
    ],
    ids=lambda part: type(part).__name__,
)
def test_each_refusal_says_what_helps(
    error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        resolve_directory("owner/name")
    assert "\n" not in str(raised.value)


def test_what_a_head_reads_is_downloaded():
    assert any(fnmatch.fnmatch(MASK_FILE, pattern) for pattern in hub.FILES)
