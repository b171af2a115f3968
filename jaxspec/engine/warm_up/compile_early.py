"""Compiles programs in other threads, before they run.

Python traces one program at a time. XLA compiles without Python's lock, so meanwhile the next one
is traced.
"""

import collections
import functools
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.state import EngineState
from jaxspec.engine.plans.sequences import kind_of, reads_of
from jaxspec.engine.programs.arguments import NewRow, admission
from jaxspec.engine.programs.compiled import logger
from jaxspec.engine.programs.programs import ADMISSIONS, ADMITTING, MANY_ADMISSIONS, Programs
from jaxspec.engine.programs.sizes import Load, ReadKey, RoundsKey, compiles_alone
from jaxspec.engine.programs.undrafted import seen_by
from jaxspec.scheduling.plan import Plan

MOST_JOBS = 8  # programs compiled at a time
ENOUGH_READS = 4  # calls that ask for a program that reads, before it is compiled beside them


class CompilesBeside:
    """Compiles programs one at a time, in a thread of its own, while others serve.

    Of the programs that read prompts, whose sizes are many, only those that are often asked for are
    compiled. Who asks while another is compiled must ask again: so nothing is left to do at the end
    of the process but the program under way.
    """

    def __init__(self, programs: Programs):
        self.programs = programs
        self._pool = ThreadPoolExecutor(1, "jaxspec-compile")
        self._job: Future[Any] | None = None
        self._asked: collections.Counter[ReadKey | RoundsKey] = collections.Counter()

    def __call__(self, key: ReadKey | RoundsKey) -> bool:
        """Begin to compile a program, unless it is rare or another is under way. Returns whether it
        was begun."""
        coming, is_free = self.programs.coming, self._job is None or self._job.done()
        self._asked[key] += 1
        is_rare = isinstance(key, ReadKey) and self._asked[key] < ENOUGH_READS
        if is_rare or key in coming or not is_free:
            return False
        compile_it = functools.partial(compile_beside, self.programs, key, self.programs.state)
        coming[key] = self._job = self._pool.submit(compile_it)
        return True


def compile_beside(programs: Programs, key: ReadKey | RoundsKey, state: EngineState) -> None:
    """Fill jax's cache with a program in another thread than the engine's, and log it.

    ``state`` has controls if such programs take them, see Programs.controlled.
    """
    started = time.perf_counter()
    if isinstance(key, RoundsKey) and key.masked:
        _compile_masked(programs, key, state)
    else:
        _compile(programs, key, state)
    seconds = time.perf_counter() - started
    logger.info("compiled %s: %.1f s, beside the work", programs.name(key), seconds)


def begin_to_compile(
    programs: Programs, keys: Iterable[ReadKey | RoundsKey], pool: ThreadPoolExecutor
) -> None:
    """Begin to compile programs without controls and masks in other threads, in this order.

    Who runs one waits for it, or compiles it here if no thread has begun with it."""
    if not programs.compiles_early:
        return
    state = programs.state  # for its shapes: the engine may donate it meanwhile
    for key in keys:
        if _is_new(programs, key):
            programs.coming[key] = pool.submit(_compile, programs, key, state)


def _is_new(programs: Programs, key: Any) -> bool:
    """Whether a program is neither ready nor begun."""
    return key not in programs.ready and key not in programs.coming


def _compile(programs: Programs, key: ReadKey | RoundsKey, state: EngineState) -> None:
    _lowered(programs, key, state).compile()


def compiling_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_JOBS, os.cpu_count() or 1))


def compile_first(programs: Programs, plan: Plan, load: Load, shape: TreeShape) -> None:
    """Begin to compile what an engine's first plans run, until one has rounds; Programs waits for
    what is ``coming``.

    For one request a program of rounds is not begun here: it would compete with the reading program
    for Python's lock and the cores, and the first token would come later. Of several the rounds
    take longer.

    Args:
      shape: of the rounds after this plan.
    """
    sequences = [plan.sequences[read.row] for read in plan.reads]
    masked = any(sequence.request.masked for sequence in sequences)
    if not sequences or masked or not programs.compiles_early:
        return
    kind = kind_of(sequences, reads=True)
    if kind.controls:  # the state that such programs take is made when the first of them runs
        return
    started, pool = time.perf_counter(), compiling_threads()
    size = ADMISSIONS if len(plan.admissions) <= ADMISSIONS else MANY_ADMISSIONS
    if _is_new(programs, ("admit", size)):
        programs.coming["admit", size] = pool.submit(_lowered_admission(programs, size).compile)
    keys = {key for key, _ in programs.readings(reads_of(plan), load, set(), kind)}
    for key in sorted(keys, reverse=True):
        if _is_new(programs, key) and key == programs.now(key):
            programs.coming[key] = pool.submit(_lowered(programs, key, programs.state).compile)
    if len(sequences) > 1:
        rows, tokens = [read.row for read in plan.reads], max(each.limit for each in sequences)
        fixed = programs.sizes.fixed_rounds
        key = programs.rounds_key(rows, tokens, load, shape, kind_of(sequences), rounds=fixed)
        if _is_new(programs, key):
            programs.coming[key] = pool.submit(_lowered(programs, key, programs.state).compile)
    pool.shutdown(wait=False)
    programs.compile_seconds += time.perf_counter() - started


def compile_program(programs: Programs, key: ReadKey | RoundsKey) -> None:
    """Fill jax's cache with a program; those with controls or masks compile when they run."""
    if programs.compiles_early and compiles_alone(key):
        _compile(programs, key, programs.state)


# The arguments are those of Programs, so that it finds the compiled program in jax's cache.


def _lowered(
    programs: Programs, key: ReadKey | RoundsKey, state: EngineState
) -> jax.stages.Lowered:
    params, state = seen_by(key, programs.params, state)
    first = params, state, programs.options(key)
    rows = programs.sizes.listed([], key.rows)
    if isinstance(key, RoundsKey):
        return programs.decode.lower(*first, np.int32(0), rows)
    counts = np.zeros(len(rows), np.int32)
    masks = np.stack([programs.all_tokens()] * len(rows)) if key.masked else None
    return programs.prefill.lower(*first, rows, counts, masks)


def _compile_masked(programs: Programs, key: RoundsKey, state: EngineState) -> None:
    """Both halves of a round; the second takes the trees that the first returns."""
    arguments = programs.params, state, programs.options(key)
    rows = programs.sizes.listed([], key.rows)
    drafting = programs.draft.lower(*arguments, rows)
    _, places = drafting.compile().output_shardings
    _, made = drafting.out_info
    tree = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        made,
        places,
    )
    words = programs.all_tokens()
    masks = np.broadcast_to(words, (*tree.tokens.shape, words.size))
    programs.verify.lower(*arguments, rows, tree, masks).compile()


def _lowered_admission(programs: Programs, size: int) -> jax.stages.Lowered:
    new = NewRow(0, (0,), 1, SamplingParams(seed=0), (), 1, ())
    arguments, options = admission([new], size, programs.sizes, programs.columns)
    params, state = programs.params, programs.state
    return programs.admit_rows.lower(params, state, *arguments, **ADMITTING, **options)
