"""Tests can be collected on one device, and without the packages that only tests need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GROUPS, NOT_BY_DEFAULT, group_of
from tests.helpers.marks import slow

ROOT = Path(__file__).parent.parent
MISSING = ("fastapi", "httpx", "hypothesis", "matplotlib", "openai", "optax", "uvicorn")
COLLECT = f"""
import importlib.abc
import sys
import jax
import pytest

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {MISSING}:
            raise ModuleNotFoundError(name, name=name)

class OneDevice:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self):
        jax.config.update("jax_num_cpu_devices", 1)

sys.meta_path.insert(0, Missing())
options = ["--collect-only", "-qrs", "-m", "", "-p", "no:hypothesispytest", *sys.argv[1:]]
status = pytest.main(options, plugins=[OneDevice()])
assert len(jax.devices()) == 1
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("paths", "missing"),
    [
        (
            ("tests/parallel/test_sharding.py", "tests/commands/test_bench_drafters.py"),
            "matplotlib",
        ),
        slow(("tests",), "openai"),
    ],
)
def test_collecting_needs_one_device_and_no_package_of_the_tests(
    paths: tuple[str, ...], missing: str
):
    result = subprocess.run(
        [sys.executable, "-c", COLLECT, *paths],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tests/parallel/test_sharding.py::test_a_grid_of_one_line_is_no_grid[4]" in result.stdout
    assert f"no {missing}: install jaxspec-decoding[test]" in result.stdout


def test_files_that_ask_byte_llm_are_run_by_one_worker():
    """Those of tests/serving/ ask it under another name; tests/clients/ are slow."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    found = {
        path.relative_to(ROOT).as_posix() for path in paths if "byte_llm" in path.read_text("utf-8")
    }
    assert len(found) > 2
    groups = {name: group_of(name) for name in found}
    assert {name: own for name, own in groups.items() if not own or own[0] != "byte_llm"} == {}


def test_files_of_groups_are_there():
    assert all((ROOT / name).exists() for paths in GROUPS.values() for name in paths)
    assert group_of("tests/engine/test_preemption.py::test_a[b]") == ("engines", 5)
    assert group_of("tests/engine/test_crowds.py::test_a[b]") is None


def test_folders_that_are_not_collected_by_default_have_no_default_tests():
    """Each of their modules is marked as a whole, or each of its tests."""
    folders = [ROOT / "tests" / name for name in NOT_BY_DEFAULT]
    sources = {p: p.read_text("utf-8") for folder in folders for p in folder.glob("test_*.py")}
    assert len(sources) > 10
    whole = ("\npytestmark = ", '\n__all__ = ["pytestmark"]')
    for path, text in sources.items():
        slow, tests = text.count("\n@pytest.mark.slow\n"), text.count("\ndef test_")
        assert any(map(text.count, whole)) or slow == tests > 0, path
