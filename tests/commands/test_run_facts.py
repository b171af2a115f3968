"""Which sources a run was of, for its records."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from jaxspec.commands.shared import run_facts
from jaxspec.commands.shared.run_facts import config_facts, source_commit
from jaxspec.evaluation.benchmarks.shapes import SHAPES


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXSPEC_COMMIT", raising=False)


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "commit.gpgsign=false"]
    command = ["git", *own, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-am", "a version", "v1")
    return tmp_path


def test_the_commit_and_whether_files_have_changed_since(checkout: Path):
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert source_commit(checkout) == commit
    (checkout / "notes.txt").write_text("not tracked")
    assert source_commit(checkout) == commit
    (checkout / "code.py").write_text("x = 2\n")
    assert source_commit(checkout) == f"{commit}-dirty"


def test_a_package_in_the_folder_of_another_project_has_no_commit(checkout: Path):
    (checkout / "site-packages").mkdir()
    assert source_commit(checkout / "site-packages") is None


def test_without_git_or_with_a_broken_checkout_there_is_none(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    broken = tmp_path_factory.mktemp("broken")
    (broken / ".git").write_text("gitdir: /nowhere\n")
    assert source_commit(broken) is None
    monkeypatch.setenv("PATH", str(broken))
    assert source_commit(checkout) is None


def test_a_copy_elsewhere_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSPEC_COMMIT", "1234")
    assert source_commit(checkout) == run_facts.run_facts()["commit"] == "1234"
    monkeypatch.setattr(run_facts, "source_commit", lambda: None)
    assert "commit" not in run_facts.run_facts()


def test_equal_layers_of_a_config_stand_there_once():
    facts = config_facts(SHAPES["llama-3.1-8b"])
    [layer] = facts["layers"]
    assert layer["indices"] == list(range(32)) and layer["mixer"]["num_kv_heads"] == 8
    assert facts["hidden_size"] == 4096
    whole = dataclasses.asdict(SHAPES["llama-3.1-8b"])
    assert 10 * len(json.dumps(facts)) < len(json.dumps(whole))
    mixed = config_facts(SHAPES["qwen3.5-9b"])["layers"]
    assert sorted(index for layer in mixed for index in layer["indices"]) == list(range(32))
    assert len(mixed) == 2
