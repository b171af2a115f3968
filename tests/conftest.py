"""Several CPU devices, for the tests of sharding; and text to train on and be tested with."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of Python files."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / f"{name}.py").write_text(f"def {name}(x):\n    return x + 1\n\n\n" * 40)
    return folder
