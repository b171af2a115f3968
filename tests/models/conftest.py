"""Checkpoints of families that several files of tests share."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.checkpoints import hf_logits
from tests.helpers.families import LENGTH, save_family


@pytest.fixture(scope="session")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, np.ndarray, np.ndarray]]:
    """name of a variant -> (its directory, tokens [2, T], transformers' logits [2, T, V])"""
    made: dict[str, tuple[Path, np.ndarray, np.ndarray]] = {}

    def make(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        if name not in made:
            directory = save_family(tmp_path_factory.mktemp(name), name)
            tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
            made[name] = directory, tokens, hf_logits(directory, tokens)
        return made[name]

    return make
