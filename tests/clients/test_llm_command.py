"""The command `llm`, as its user calls it: chats, completions and responses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clients import ABROAD, CALL, SUNNY, Place, client_package
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Script

client_package("llm")
pytestmark = pytest.mark.slow
TOOL = 'def weather(city: str) -> str:\n    "The weather."\n    return city + ": 12 °C"\n'
KINDS: Any = {"chat": {}, "completion": {"completion": True}, "responses": {"responses": True}}


@pytest.fixture
def command(listener: Listening, tmp_path: Path) -> Callable[..., Any]:
    """Runs it, with a folder of its own in which the server's models stand."""
    can = {"supports_schema": True, "supports_tools": True, "api_key_name": "server"}
    models = [
        {"model_id": kind, "model_name": MODEL, "api_base": listener.url, **can, **options}
        for kind, options in KINDS.items()
    ]
    models.append({"model_id": "other", "model_name": "other", "api_base": listener.url, **can})
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONUTF8": "1"}
    environment["LLM_LOAD_PLUGINS"] = ""  # none but its own

    def run(*options: str, key: str = KEY) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "llm", *options, "--key", key],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_it_prints_an_answer(
    command: Callable[..., Any], says: Callable[..., Script], kind: str, options: tuple[str, ...]
):
    says(ABROAD)
    found = command("prompt", "-m", kind, *options, "abc")
    assert found.stdout == f"{ABROAD}\n", found.stderr


@pytest.mark.usefixtures("server")
def test_it_prints_a_completion(command: Callable[..., Any]):
    asked = ("prompt", "-m", "completion", "-o", "max_tokens", "24", "abc")
    streamed, whole = command(*asked), command(*asked, "--no-stream")
    assert streamed.stdout == whole.stdout and whole.returncode == 0, whole.stderr


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_it_calls_a_tool(command: Callable[..., Any], says: Callable[..., Script], kind: str):
    script = says(CALL, SUNNY)
    found = command("prompt", "-m", kind, "--functions", TOOL, "abc")
    assert found.stdout.strip() == SUNNY, found.stderr
    assert CALL in script.prompts[1] and "<tool>Zürich: 12 °C</tool>" in script.prompts[1]


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_structured_output(command: Callable[..., Any], kind: str):
    schema = json.dumps(Place.model_json_schema())
    found = command("prompt", "-m", kind, "--schema", schema, "abc")
    assert found.returncode == 0, found.stderr
    Place.model_validate_json(found.stdout)


def test_it_goes_on_with_a_conversation(command: Callable[..., Any], says: Callable[..., Script]):
    script = says("erstens", "zweitens")
    command("prompt", "-m", "chat", "abc")
    found = command("prompt", "-m", "chat", "-c", "und?")
    assert found.stdout == "zweitens\n", found.stderr
    assert "erstens" in script.prompts[1]


@pytest.mark.usefixtures("server")
def test_errors_are_told(command: Callable[..., Any]):
    for options, key, told in (
        (("-m", "chat"), "other", "401"),
        (("-m", "other"), KEY, "404"),
        (("-m", "chat", "-o", "max_tokens", "9999"), KEY, "do not fit"),
    ):
        found = command("prompt", *options, "abc", key=key)
        assert found.returncode == 1 and told in found.stderr and "Error" in found.stderr
