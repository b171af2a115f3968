"""What starting costs: names that load when asked for, help without jax, Ctrl-C at any moment."""

import importlib
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxspec
import jaxspec.__main__ as command_line
from jaxspec.llm import tokenizer
from tests.helpers.marks import slow

ROOT = Path(__file__).parents[2]
# Runs a command that heeds SIGINT, which a shell's background jobs ignore.
AS_IN_A_TERMINAL = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
HEAVY = ("jax", "numpy", "transformers", "flax", "huggingface_hub")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", [jaxspec, tokenizer])
def test_every_public_name_resolves(package: ModuleType):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no'"):
        _ = package.no


def test_a_name_is_that_of_its_module():
    assert jaxspec.LLM is importlib.import_module("jaxspec.llm.llm").LLM
    assert jaxspec.load is importlib.import_module("jaxspec.checkpoints.load").load


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "jaxspec", "--help"],
        ["-m", "jaxspec", "--version"],
        ["-m", "jaxspec", "generate", "--help"],
        ["scripts/generate.py", "--help"],
        ["scripts/generate.py", "--no-such-option"],
        ["scripts/generate.py", "--prompt", ""],
        ["-c", "import jaxspec"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_imports_no_jax(arguments: list[str]):
    ended = python("-X", "importtime", *arguments)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "jaxspec" in imported
    assert not imported & set(HEAVY)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (["scripts/generate.py"], "jaxspec.checkpoints.built_in"),
        slow(["scripts/generate.py"], "rich.console"),
        (["scripts/generate.py"], "numpy.dtypes"),
        slow(["scripts/generate.py"], "jax._src.core"),
        (["-m", "jaxspec", "generate"], "jaxspec.decoding.functional"),
        slow(["scripts/bench_engine.py"], "jax._src.lax"),
    ],
)
def test_ctrl_c_while_modules_load_is_one_line(program: list[str], module: str):
    """SIGINT, sent when Python says that it has imported a module."""
    command = [sys.executable, "-X", "importtime", *program]
    with subprocess.Popen(
        [sys.executable, "-c", AS_IN_A_TERMINAL, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail(f"{module} was not imported")
        rest = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.returncode == command_line.INTERRUPTED
    assert [line.endswith(": interrupted\n") for line in rest] == [True], rest
