"""What the tests of clients share: the packages, and what is asked and said."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.helpers.spoken import called, thought

# What does not stand in the extra `clients`, and why not: see docs/results/clients.md.
ALONE = {"instructor": "uv pip install --no-deps instructor"}
ABROAD = "naïve – Zürich, 日本語, 🙂👩‍👩‍👧"
# Of an answer that calls a tool, after reasoning and text, and of the last one.
CALL = called("weather", '{"city": "Zürich"}')
CALLS = f"{thought('schön')}Moment …\n{CALL}"
SUNNY = "Sonnig ☀️"


class Place(BaseModel):
    """A city."""

    city: Literal["Zürich", "東京"]
    known: bool


PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "東京"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}


def client_package(name: str) -> Any:
    """The module of a client. Where it is not installed, the tests of the file are skipped."""
    cure = ALONE.get(name, 'uv pip install -e ".[test,clients]"')
    return pytest.importorskip(name, reason=f"no {name}: {cure}")
