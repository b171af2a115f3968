"""Compiles the programs of a training run side by side, before any of its steps is timed."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from jax.stages import Lowered

from jaxspec import memory


def compile_together(programs: Mapping[str, Lowered], advice: str) -> None:
    """Compile ``programs``, given by name, so that calls of their functions find them in jax's
    cache. XLA compiles without Python's lock.

    Raises ValueError, which gives ``advice``, if one needs more memory than the device has free.
    """
    with ThreadPoolExecutor(len(programs)) as pool:
        compiled = pool.map(lambda lowered: lowered.compile(), programs.values())
        for name, program in zip(programs, compiled, strict=True):
            memory.check_program(program, name, advice)
