"""One tiny model for the tests of clients."""

import pytest

from jaxspec import LLM


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Clients take seconds to import: runs without slow tests leave their files out."""
    return True if "not slow" in config.option.markexpr else None


@pytest.fixture(scope="session")
def llm(byte_llm: LLM) -> LLM:
    return byte_llm
