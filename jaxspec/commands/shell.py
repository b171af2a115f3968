"""What all commands share: the look of their help, and how they end."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from jaxspec.built_in import BUILT_IN_MODEL
from jaxspec.commands.importing import INTERRUPTED

TABLE_WIDTH = 130  # at least, where the output is no terminal


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines, and adds to an option's help its default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if action.required or default == argparse.SUPPRESS or "(default: " in text:
            return text
        if default is None or default is False:
            default = "none" if default is None else "off"
        elif isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        return f"{text} (default: {str(default).replace('%', '%%')})"


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of the command ``jaxspec NAME``. Option names are not abbreviated."""
    return argparse.ArgumentParser(
        prog=f"jaxspec {name}",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=str(BUILT_IN_MODEL),
        help="model directory or hub id (default: the built-in model)",
    )


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
    expected: tuple[type[Exception], ...] = (ValueError, OSError),
) -> int:
    """Run a command; returns its exit status. Expected errors and Ctrl-C end it in one line."""
    try:
        run(parser.parse_args(arguments))
    except BrokenPipeError:  # who reads our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    except expected as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def progress_console() -> Console:
    """Where progress is shown: stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def table_console(*, stderr: bool, width: int = TABLE_WIDTH) -> Console:
    """For tables, which are at least so wide where the output is no terminal."""
    console = Console(stderr=stderr, highlight=False)
    console.width = max(console.width, width)
    return console


def typed_command() -> str:
    """The command line as it was typed, for records of a run."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        words = ["python3", "-m", program.parent.name]
    elif program.suffix == ".py":
        words = ["python3", str(program)]
    else:
        words = [program.name]
    return shlex.join([*words, *sys.argv[1:]])
