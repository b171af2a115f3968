"""One tiny model for all tests of the server."""

import dataclasses
from pathlib import Path

import pytest

from jaxspec import LLM
from jaxspec.structured import StructuredOutput
from tests.checkpoints import tiny_byte_llama
from tests.engines import FULL, seal, tiny_llm


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_byte_llama(tmp_path_factory.mktemp("served"), eos_token_id=256)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    llm = tiny_llm(model)
    seal(llm.engine, dataclasses.replace(FULL, structured=StructuredOutput(json_object=True)))
    return llm
