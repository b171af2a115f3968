"""One tiny model for all tests of the server."""

from pathlib import Path

import pytest

from jaxspec import LLM


@pytest.fixture(scope="session")
def model(byte_model: Path) -> Path:
    return byte_model


@pytest.fixture(scope="session")
def llm(byte_llm: LLM) -> LLM:
    return byte_llm
