"""Compiles programs in other threads, before they run.

Python traces one program at a time. XLA compiles without Python's lock, so meanwhile the next one
is traced.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.plans.sequences import kind_of, reads_of
from jaxspec.engine.programs.arguments import NewRow, admission
from jaxspec.engine.programs.programs import ADMISSIONS, ADMITTING, Programs
from jaxspec.engine.programs.sizes import Load, ReadKey, RoundsKey
from jaxspec.scheduling.plan import Plan

MOST_JOBS = 8  # programs compiled at a time


def compiling_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_JOBS, os.cpu_count() or 1))


def compile_first(programs: Programs, plan: Plan, load: Load) -> None:
    """Begin to compile what an engine's first plan runs; Programs waits for what is ``coming``.

    A program of rounds is not begun here: traced in another thread, it would compete with the
    reading program for Python's lock and the cores, and the first token would come later.
    """
    sequences = [plan.sequences[read.row] for read in plan.reads]
    masked = any(sequence.request.masked for sequence in sequences)
    if not sequences or masked or not programs.compiles_early:
        return
    kind = kind_of(sequences, reads=True)
    if kind.controls:  # the state that such programs take is made when the first of them runs
        return
    started, pool = time.perf_counter(), compiling_threads()
    if ("admit", ADMISSIONS) not in programs.ready:
        lowered = _lowered_admission(programs)
        programs.coming["admit", ADMISSIONS] = pool.submit(lowered.compile)
    for key, _ in programs.readings(reads_of(plan), load, set(), kind):
        if key not in programs.ready:
            programs.coming[key] = pool.submit(_lowered(programs, key).compile)
    pool.shutdown(wait=False)
    programs.compile_seconds += time.perf_counter() - started


def compile_program(programs: Programs, key: ReadKey | RoundsKey) -> None:
    """Fill jax's cache with a program; those with controls or masks compile when they run."""
    if programs.compiles_early and not (key.kind.controls or key.masked):
        _lowered(programs, key).compile()


# The arguments are those of Programs, so that it finds the compiled program in jax's cache.


def _lowered(programs: Programs, key: ReadKey | RoundsKey) -> jax.stages.Lowered:
    params, state = programs.params, programs.state
    rows = programs.sizes.listed([], key.rows)
    if isinstance(key, ReadKey):
        counts = np.zeros(len(rows), np.int32)
        return programs.prefill.lower(params, state, programs.options(key), rows, counts, None)
    return programs.decode.lower(params, state, programs.options(key), np.int32(0), rows)


def _lowered_admission(programs: Programs) -> jax.stages.Lowered:
    new = NewRow(0, (0,), 1, SamplingParams(seed=0), (), 1, ())
    arguments, options = admission([new], ADMISSIONS, programs.sizes, programs.columns)
    params, state = programs.params, programs.state
    return programs.admit_rows.lower(params, state, *arguments, **ADMITTING, **options)
