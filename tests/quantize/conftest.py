"""A model and texts that tests of the quantizer's commands share."""

from pathlib import Path

import pytest

from tests.helpers.checkpoints import tiny_byte_llama


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "data"  # held out are files by their names
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.py").write_text("".join(f"value_{i * j} = {j} + {i}\n" for j in range(20)))
    return folder
