"""What the commands share: parsers, error handling and consoles. Imports no jax."""

import argparse
import contextlib
import json
import os
import shlex
import string
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from jaxspec.checkpoints.built_in import BUILT_IN_MODEL
from jaxspec.commands.shared.importing import INTERRUPTED

TABLE_WIDTH = 130  # least width where the output is not a terminal
JSON_PARTS = "a line of JSON on stdout for each part, as it is measured; tables on stderr"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description, and adds the default to the help of an option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if action.required or default == argparse.SUPPRESS or "(default: " in text:
            return text
        if default is None or default is False:
            default = "none" if default is None else "off"
        elif isinstance(default, (list, tuple)):
            default = (" " if action.nargs else ",").join(map(str, default))  # as it is given
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
    parser.add_argument("--model", default=str(BUILT_IN_MODEL), help="model directory or hub id "
        "(default: the built-in model)")  # fmt: skip


def given_option(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: Iterable[str]
) -> str | None:
    """The first option, by these names of its values, that is not at its default; None: all are."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            return f"--{name.replace('_', '-')}"
    return None


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
    expected: tuple[type[Exception], ...] = (ValueError, OSError),
) -> int:
    """Run a command; returns its exit status. Expected errors, Ctrl-C and what is warned of print
    one line each."""
    try:
        with _warnings_in_a_line(parser.prog):
            run(parser.parse_args(arguments))
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit fails
        return 1
    except expected as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


@contextlib.contextmanager
def _warnings_in_a_line(program: str) -> Iterator[None]:
    """Warnings are shown without the place in the source that they came from."""

    def show(message: Warning | str, *_: object) -> None:
        print(f"{program}: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def progress_console() -> Console:
    """The console for progress, on stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def table_console(*, stderr: bool, width: int = TABLE_WIDTH) -> Console:
    """A console for tables, at least ``width`` wide where the output is not a terminal."""
    console = Console(stderr=stderr, highlight=False)
    console.width = max(console.width, width)
    return console


def left_table(
    title: str,
    caption: str | None = None,
    *,
    left: Iterable[str] = (),
    right: Iterable[str] = (),
) -> Table:
    """A table whose title and caption begin where it does, and its columns of text and numbers."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table


class _Cells(string.Formatter):
    """Formats of cells: None is blank, and the items of a list are joined."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return " + ".join(self.format_field(item, format_spec) for item in value)
        return "" if value is None else super().format_field(value, format_spec)


def add_rows(table: Table, formats: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Add a row for each mapping. The cells' formats have its keys, such as ``{round_ms:.3f}``."""
    formats, cells = list(formats), _Cells()
    for row in rows:
        table.add_row(*(cells.vformat(form, (), row) for form in formats))


def device_line(facts: Mapping[str, Any]) -> str:
    """What a run was measured with, by its run_facts: device, jax version and date."""
    return f"{facts['device']}, jax {facts['jax']}, {facts['date']}"


def show_results(
    results: Mapping[str, Any], table: Table | Group, *, as_json: bool, width: int = TABLE_WIDTH
) -> None:
    """Print the table; with ``as_json``, the results on stdout and the table on stderr."""
    table_console(stderr=as_json, width=width).print(table)
    if as_json:
        print_json(results)


def print_json(results: Mapping[str, Any]) -> None:
    """Print the results as a line on stdout, at once."""
    print(json.dumps(results), flush=True)


def show_parts(
    parts: Iterable[Mapping[str, Any]],
    of: str,
    make_tables: Callable[[dict[str, Any]], Sequence[Table]],
    *,
    as_json: bool,
    width: int = TABLE_WIDTH,
) -> dict[str, Any]:
    """``collect_parts``, and print the tables of the results: with ``as_json`` on stderr."""
    results = collect_parts(parts, of, as_json=as_json)
    for table in make_tables(results):
        table_console(stderr=as_json, width=width).print(table)
    return results


def collect_parts(parts: Iterable[Mapping[str, Any]], of: str, *, as_json: bool) -> dict[str, Any]:
    """The results of all parts of a measurement in one: the lists called ``of`` are joined, and of
    everything else the last value counts.

    With ``as_json`` each part is a line of JSON on stdout as soon as it is measured, so that a run
    which is cut off leaves what it has.
    """
    joined: list[Any] = []
    results: dict[str, Any] = {}
    for part in parts:
        if as_json:
            print_json(part)
        joined += part[of]
        results |= part
    return results | {of: joined}


def typed_command() -> str:
    """The command line as it was typed, for the records of a run."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        words = ["python3", "-m", program.parent.name]
    elif program.suffix == ".py":
        words = ["python3", str(program)]
    else:
        words = [program.name]
    return shlex.join([*words, *sys.argv[1:]])
