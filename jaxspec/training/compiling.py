"""Compiles the programs of a training run side by side, before any of its steps is timed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from jax.stages import Lowered

from jaxspec.engine import memory


class Program(NamedTuple):
    """``name`` and ``advice`` are for the error of a program that does not fit: what it is, and
    what would make it smaller."""

    name: str
    lowered: Lowered
    advice: str


def compile_together(programs: Sequence[Program]) -> None:
    """Compile ``programs``, so that calls of their functions find them in jax's cache. XLA compiles
    without Python's lock.

    Raises ValueError, with its advice, for the first that needs more memory than the device has
    free.
    """
    with ThreadPoolExecutor(len(programs)) as pool:
        compiled = pool.map(lambda program: program.lowered.compile(), programs)
        for program, executable in zip(programs, compiled, strict=True):
            memory.check_program(executable, program.name, program.advice)
