"""Model names to directories."""

from pathlib import Path

import pytest

from jaxspec.weights import hub
from jaxspec.weights.hub import resolve_directory


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
