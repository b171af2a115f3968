"""Compiles, while no request runs, what later ones may ask for.

A server is ready with few programs, and with all that move rows and pages (compile_general). A
request that needs another one would wait for its compiler: one with log-probabilities, penalties, a
structured output, long texts. So their programs are compiled one by one whenever the engine has
nothing to do, from the likeliest on.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.sizes import SMALLEST_TABLE, ReadKey, RoundsKey
from jaxspec.engine.programs.structured import prepare_program
from jaxspec.engine.warm_up.compile_all import (
    Coverage,
    coverage,
    reading_keys,
    rounds_keys,
    steps,
)
from jaxspec.engine.warm_up.compile_kinds import CompilesKinds, all_done
from jaxspec.llm.async_llm import AsyncLLM

SAMPLED = SamplingParams(temperature=1.0)
FULL = dataclasses.replace(SAMPLED, logprobs=1, presence_penalty=0.5)
MASKED = dataclasses.replace(FULL, structured=StructuredOutput(json_object=True))
PROMPT = dataclasses.replace(FULL, prompt_logprobs=1)
OTHERS = 16  # programs that may come beside these, at most
PAUSE = 0.2  # seconds between two looks whether the engine is idle
IDLE = 2.0  # seconds without a request before a program is compiled: who comes next is not slowed

type Key = ReadKey | RoundsKey


@dataclasses.dataclass
class WarmUp:
    """How far compiling in the background is: ``done`` of so many ``programs``."""

    done: int = 0
    programs: int = 0


async def warm_in_background(
    llm: AsyncLLM,
    goes_on: Callable[[], bool] = lambda: True,
    progress: WarmUp | None = None,
    idle: float = IDLE,
) -> bool:
    """Compile them all.

    One program at a time is compiled, in another thread than the engine's, so that a request which
    comes meanwhile does not wait for it. Under a load without pauses nothing is compiled but what
    requests need.

    Args:
      goes_on: asked before each program. A server that ends compiles no more: its end would wait
        for the compiler.
      progress: is told how far it is.
      idle: seconds without a request before it begins, or goes on after one.

    Returns whether all are compiled. Raises RuntimeError if the AsyncLLM is closed, or a program
    cannot be compiled.
    """
    keys, progress = await llm.run(missing_programs), progress or WarmUp()
    progress.programs += len(keys)
    quiet = 0.0
    with contextlib.closing(CompilesKinds()) as compiler:
        for key in keys:
            while goes_on():
                if llm.holds or not await llm.run(_is_idle):
                    quiet = 0.0
                elif quiet >= idle and await _compile(llm, compiler, key):
                    break
                await asyncio.sleep(PAUSE)
                quiet += PAUSE
            if not goes_on():
                return False
            progress.done += 1
    return True


def missing_programs(engine: Engine) -> list[Key]:
    """Programs that serve every request and are not ready, the likeliest first.

    There are no more than may be kept.
    """
    keys = [*_keys(engine, SAMPLED), *_keys(engine, FULL), *_keys(engine, MASKED)]
    keys += [*_keys(engine, dataclasses.replace(FULL, plain=True)), *_keys(engine, PROMPT)]
    keys += _keys(engine, dataclasses.replace(MASKED, plain=True))
    programs = engine.programs
    missing = [key for key in dict.fromkeys(keys) if key not in programs.ready]
    return missing[: max(0, programs.max_programs - len(programs.ready) - OTHERS)]


def _is_idle(engine: Engine) -> bool:
    return not engine.has_work


def _keys(engine: Engine, sampling: SamplingParams) -> list[Key]:
    """Programs of requests like this: in several sizes if they are the usual ones, else in the
    largest, and the smallest number of rows. Prompts of the others are read one after the other;
    those that are scored are many and short, and have all widths."""
    most = engine.programs.sizes.num_rows // engine.programs.shards
    is_usual, longest = sampling == SAMPLED, engine.limits.max_length
    few = steps(1, most) if is_usual else [1]
    lengths = (longest, min(longest, SMALLEST_TABLE)) if is_usual else (longest,)
    covers = [_cover(engine, sampling, tokens, few) for tokens in lengths]
    rounds = [key for cover in covers for key in rounds_keys(engine.programs, cover)]
    reads = reading_keys(engine.programs, covers[0])
    if not is_usual:
        least = min(key.rows for key in reads)
        reads = [key for key in reads if key.rows == least]
    if not is_usual and sampling != PROMPT:
        widths = [key.width for key in reads]
        reads = [key for key in reads if key.width in (min(widths), max(widths))]
    return [*rounds, *reads]


def _cover(engine: Engine, sampling: SamplingParams, tokens: int, few: list[int]) -> Coverage:
    """What requests like this need; those without a drafter have no tree."""
    trees = (PLAIN,) if sampling.plain else engine.shapes.compiled_ahead(engine.shape)
    return coverage(engine.programs, engine.limits, trees, (sampling,), tokens, few)


async def _compile(llm: AsyncLLM, compiler: CompilesKinds, key: Key) -> bool:
    """Compile a program beside the engine's thread; False: the engine is busy."""

    def begin(engine: Engine) -> list[Future[Any]] | None:
        if llm.holds or not _is_idle(engine):
            return None
        if engine.programs.compiles_beside and not engine.programs.is_ready(key):
            return [compiler.begin_program(engine, key)]
        prepare_program(engine.programs, key)
        return []

    futures = await llm.run(begin)
    if futures:
        await all_done(futures)
        await llm.run(lambda engine: prepare_program(engine.programs, key))
    return futures is not None
