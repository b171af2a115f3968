"""OpenAI's client for Node: chats, completions and responses, by the script node_openai.mjs.

Where its package is: in NODE_CLIENTS, a folder with `node_modules`, or the present one.
"""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clients import ABROAD, SUNNY, Place
from tests.helpers.listening import KEY, Listening
from tests.helpers.served import MODEL
from tests.helpers.spoken import Script, called, thought

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("node_openai.mjs")
FOLDER = Path(os.environ.get("NODE_CLIENTS", "."))
CALL = called("weather", '{"city": "Zürich", "known": true}')


@functools.cache
def node() -> str:
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node: install Node.js 20 or newer")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        cure = "npm install --prefix DIR openai, then set NODE_CLIENTS=DIR"
        pytest.skip(f"no package openai of Node: {cure}")
    return program


def step(listener: Listening, name: str, **variables: str) -> Any:
    """What a step of the script prints."""
    environment = {**os.environ, "NODE_CLIENTS": str(FOLDER.resolve()), **variables}
    command = [node(), str(SCRIPT), listener.url, KEY, MODEL, name]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
def test_a_stream_is_the_whole_answer(server: Listening, name: str):
    found = step(server, name)
    assert "".join(found["pieces"]) == found["whole"] and len(found["pieces"]) > 5


def test_characters_of_several_tokens_come_whole(brief: Listening):
    found = step(brief, "abroad", TEXT=ABROAD)
    assert "".join(found["pieces"]) == found["whole"] == ABROAD and len(found["pieces"]) > 10


def test_structured_output(brief: Listening):
    for text in step(brief, "structured").values():
        Place.model_validate_json(text)


@pytest.mark.parametrize("streams", ["0", "1"], ids=["whole", "streamed"])
def test_the_client_runs_tools(listener: Listening, says: Callable[..., Script], streams: str):
    script = says(f"{thought('schön')}Moment …\n{CALL}", SUNNY)
    found = step(listener, "tools", STREAMS=streams)
    assert found == {"asked": ["Zürich"], "content": SUNNY}
    assert CALL in script.prompts[1] and "<tool>12 °C</tool>" in script.prompts[1]


def test_errors_are_the_clients(server: Listening):
    kinds = ("AuthenticationError", "NotFoundError", "BadRequestError")
    assert tuple(step(server, "errors").values()) == kinds
