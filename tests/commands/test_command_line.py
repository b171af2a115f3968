"""The command `jaxspec`: its list of commands, their help, and how they end."""

import argparse
import importlib
import io
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

import jaxspec
import jaxspec.__main__ as command_line
from jaxspec.commands.generate import generation
from jaxspec.commands.shared import shell
from jaxspec.commands.shared.option_types import (
    number,
    numbers,
    positive,
    positives,
    tensor_parallel,
    whole_number,
    whole_numbers,
)
from jaxspec.commands.shared.program_cache import default_folder

ROOT = Path(__file__).parents[2]


def script_of(command: str) -> str:
    return command.replace(" ", "_").replace("-", "_")


SCRIPTS = {script_of(command): command for command in command_line.COMMANDS}


def module_of(command: str) -> ModuleType:
    name = command.replace(" ", ".").replace("-", "_")
    return importlib.import_module(f"jaxspec.commands.{name}")


def ended(arguments: list[str]) -> int | str | None:
    """The exit status of a command line that argparse ends."""
    with pytest.raises(SystemExit) as end:
        command_line.main(arguments)
    return end.value.code


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert ended(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, text in command_line.COMMANDS.items():
        assert f"  {name} " in printed and text in printed


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_help_is_complete_in_itself(command: str):
    """Every option says what it is, and none sends to another command."""
    parser = module_of(command).make_parser()
    helps = {action.dest: action.help or "" for action in parser._actions}
    assert not [name for name, text in helps.items() if not text.strip() or text.startswith("(")]
    assert "as in " not in parser.format_help()


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]):
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"jaxspec {jaxspec.__version__}"
    assert jaxspec.__version__.startswith("0.") or jaxspec.__version__ == "0+unknown"


@pytest.mark.parametrize("words", [["nothing"], ["bench"], ["bench", "nothing"]])
def test_an_unknown_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert ended(words) == 2
    assert f"no command '{' '.join(words)}'" in capsys.readouterr().err


@pytest.mark.parametrize(("former", "name"), command_line.FORMER_NAMES.items())
def test_a_former_name_says_the_new_one(former: str, name: str, capsys: pytest.CaptureFixture[str]):
    assert name in command_line.COMMANDS
    assert ended([former, "--steps", "3"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"jaxspec: error: the command '{former}' is now '{name}': run `jaxspec {name}`"


def test_no_command_shows_the_list(capsys: pytest.CaptureFixture[str]):
    assert command_line.main([]) == 2
    assert "bench engine" in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_its_command(script: str, monkeypatch, capsys: pytest.CaptureFixture[str]):
    path = ROOT / "scripts" / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    usage = " ".join(capsys.readouterr().out.split())
    assert usage.startswith(f"usage: jaxspec {SCRIPTS[script]} [-h]")
    assert len(path.read_text().splitlines()) <= 10


def test_every_command_has_a_script():
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_every_option_says_what_it_does_and_its_default(command: str):
    parser = module_of(command).make_parser()
    formatter = shell.HelpFormatter(parser.prog)
    silent = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        text = formatter._expand_help(action) if action.help else ""
        if not text or not (action.required or "(default: " in text):
            silent.append(action.option_strings)
    assert not silent


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_an_option_that_counts_refuses_less_than_one(command: str, capsys):
    parser = module_of(command).make_parser()
    counting = [action for action in parser._actions if action.type in (number, numbers, positive)]
    for action in counting:
        text = "1,0" if action.type is numbers else "0"
        assert ended([*command.split(), *action.option_strings[:1], text]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert action.option_strings[0] in last and "got '0'" in last


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (numbers, "4,1,4", (4, 1, 4)),
        (positives, "0.5,2", (0.5, 2.0)),
        (whole_number, "0", 0),
        (whole_numbers, "0,1", (0, 1)),
        (tensor_parallel, "4", 4),
        (tensor_parallel, "2x3", (2, 3)),
        *((numbers, text, None) for text in ("", "1,", "x", "1.5", "-1")),
        *((positives, text, None) for text in ("", "0", "x", "nan", "inf", "1,-1")),
        *((whole_number, text, None) for text in ("", "-1", "1.5", "x")),
        *((whole_numbers, text, None) for text in ("", "0,", "-1", "x")),
        *((tensor_parallel, text, None) for text in ("", "x2", "2x", "-1")),
    ],
)
def test_types_of_options(parse: Callable[[str], object], text: str, value: object):
    if value is None:
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
    else:
        assert parse(text) == value


def test_generate_loads_nothing_of_training():
    code = (
        "import sys, jaxspec.commands.generate.generation\n"
        "names = ('jaxspec.training', 'optax', 'matplotlib', 'flax', 'transformers', 'jinja2')\n"
        "assert not set(names) & set(sys.modules), sys.modules.keys()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("command", "module", "package", "extra"),
    [
        ("train-drafter", "train_drafter", "optax", "train"),
        ("serve", "serve", "fastapi", "serve"),
    ],
)
def test_a_missing_extra_is_one_line(
    command: str, module: str, package: str, extra: str, monkeypatch, capsys
):
    import_module = importlib.import_module

    def without_package(name: str) -> ModuleType:
        if name == f"jaxspec.commands.{module}":
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", without_package)
    assert command_line.main([command]) == 2
    assert capsys.readouterr().err == (
        f"jaxspec {command}: {package} is not installed: pip install 'jaxspec-decoding[{extra}]'\n"
    )


def test_ctrl_c_ends_in_one_line(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "make_llm", interrupted)
    assert command_line.main(["generate", "--no-compilation-cache"]) == 130
    assert capsys.readouterr().err.splitlines() == ["jaxspec generate: interrupted"]


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["/bin/jaxspec", "generate", "--prompt", "a b"], "jaxspec generate --prompt 'a b'"),
        (["scripts/train_lm.py", "--steps", "3"], "python3 scripts/train_lm.py --steps 3"),
        (["/lib/jaxspec/__main__.py", "eval-drafter"], "python3 -m jaxspec eval-drafter"),
    ],
)
def test_records_hold_the_command_as_it_was_typed(words, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", words)
    assert shell.typed_command() == typed


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/jaxspec/compilation"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/jaxspec/compilation"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/jaxspec/compilation"),
        ({"XDG_CACHE_HOME": "/xdg", "JAX_COMPILATION_CACHE_DIR": "/own"}, "/own"),
    ],
)
def test_where_compiled_programs_are_kept(environment, folder, monkeypatch):
    for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | environment).items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(folder)


def test_a_left_table_begins_where_its_title_does():
    table = shell.left_table("title", "caption", left=["case"], right=["tokens/s", "layers", "of"])
    row = {"mode": "plain", "rate": 7.0, "layers": [2, 3], "share": None}
    shell.add_rows(table, ("{mode}", "{rate:.0f}", "{layers}", "{share:.0%}"), [row])
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(table)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[0] == "title" and lines[-1] == "caption"
    cells = [word.strip(" │┃") for word in lines[4].split("│")]
    assert cells[1:5] == ["plain", "7", "2 + 3", ""]


def test_the_device_line_names_what_a_run_was_measured_with():
    facts = {"device": "H100", "jax": "0.11.2", "date": "2026-11-22", "command": "jaxspec"}
    assert shell.device_line(facts) == "H100, jax 0.11.2, 2026-11-22"
