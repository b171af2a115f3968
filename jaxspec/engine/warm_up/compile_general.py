"""Compiles the few programs that serve nearly any request, however rare its kind.

A server is ready when they are there. They are slower than those that are made for a kind: their
rounds have all rows, and draft nothing where the engine chooses its trees.
"""

from concurrent.futures import ThreadPoolExecutor, wait

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.sizes import Kind
from jaxspec.engine.programs.structured import prepare_program
from jaxspec.engine.warm_up.compile_all import compile_small, coverage
from jaxspec.engine.warm_up.compile_early import compile_beside
from jaxspec.engine.warm_up.compile_kinds import Key, RequestKind, reading_key, rounds_keys

WIDTH = 64  # prompt tokens of a row that are read at a time: longer prompts are read in parts
ANYTHING = SamplingParams(
    temperature=1.0,
    logprobs=1,
    presence_penalty=0.5,
    structured=StructuredOutput(json_object=True),
)


class GeneralPrograms:
    """Begins to compile them in the threads of ``pool``; ``finish`` waits for them.

    Meanwhile the engine may run, and compile what it needs.
    """

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor):
        programs = self._programs = engine.programs
        self._engine, self._keys = engine, general_keys(engine)
        self._coming = {}
        if not programs.compiles_beside:
            return
        with programs.controlled(Kind.FULL):
            state = programs.state
        for key in self._keys:
            self._coming[key] = pool.submit(compile_beside, programs, key, state)

    def finish(self) -> None:
        """Wait until they are there, and compile what moves rows and pages; the engine is idle.

        Raises what the compiler has raised.
        """
        programs = self._programs
        wait(self._coming.values())
        programs.coming |= self._coming
        for key in self._keys:
            prepare_program(programs, key)
        compile_moves(self._engine)


def compile_moves(engine: Engine) -> None:
    """Compile what moves rows and pages of any request; the engine is idle."""
    shapes, most = engine.shapes.compiled_ahead(engine.shape), engine.limits.max_length
    cover = coverage(engine.programs, engine.limits, shapes, (ANYTHING,), most, rows=[1])
    compile_small(engine.programs, cover)


def general_keys(engine: Engine) -> list[Key]:
    """Programs that together serve any request but those that ask for log-probabilities of their
    prompts or of the policy, which would slow all others, and where an engine has a fixed tree, for
    plain decoding. Such requests wait for programs of their own.

    A deterministic engine has none: each of its kinds has exactly one program.
    """
    sizes = engine.programs.sizes
    if sizes.fixed:
        return []
    width = sizes.width_for(WIDTH)
    masked = RequestKind(Kind.FULL, Kind.FULL, True, width, sizes.columns, plain=False)
    free = masked._replace(masked=False)
    rounds = [*rounds_keys(engine, free), *rounds_keys(engine, masked)]
    return [*rounds, reading_key(engine, masked)]
