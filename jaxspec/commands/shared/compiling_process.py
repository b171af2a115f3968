"""Commands that compile for devices that are not here, in a process of their own: jax reads the
environment only when it starts."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxspec.commands.shared.shell import run_command

ROOT = Path(__file__).resolve().parents[3]  # the folder that contains the package


def add_compiler_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--wheels", type=Path, default=Path(".cache/aot-wheels"), help="folder of the compiler")
    add("--in-this-process", action="store_true", help=argparse.SUPPRESS)


def run_compiling(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, advice: str = ""
) -> str:
    """Run ``jaxspec`` with these arguments and --in-this-process; what it printed, stderr included.

    That is written to ``log``, too. Raises RuntimeError with its last line, and ``advice``, if the
    process fails.
    """
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    with log.open("w") as file:
        result = subprocess.run(
            [sys.executable, "-m", "jaxspec", *arguments, "--in-this-process"],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    printed = log.read_text(errors="replace")
    if result.returncode:
        said = [line.strip() for line in printed.splitlines() if line.strip()]
        last = said[-1] if said else "it said nothing"
        raise RuntimeError(f"the compiling process failed ({result.returncode}): {last}{advice}")
    return printed


def run_or_compile(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, Sequence[str]], None],
    compile_here: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> int:
    """The command's exit status: of ``run``, which gets the arguments, too, to pass them on; or, in
    the process that it starts with them, of ``compile_here``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(words)
    if args.in_this_process:
        compile_here(args)
        return 0
    expected = (ValueError, OSError, RuntimeError)
    return run_command(parser, lambda args: run(args, words), words, expected)
