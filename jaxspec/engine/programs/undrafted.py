"""Programs without a drafter, for rows that it has not read.

They run on the engine's state without the drafter's part, which is put back afterwards as it was:
no array is copied. A program with the drafter serves such rows too, if there is no other: it reads
and drafts poorly what it has not read from the start, and the target verifies every token.
"""

from typing import Any

from jaxspec.decoding.drafters import NoDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.engine.programs.sizes import ReadKey, RoundsKey


def without_drafter(params: EngineParams) -> EngineParams:
    """The same engine, as if it decoded plainly. Its states are of the same capacity."""
    return params.replace(drafter=NoDrafter())


def seen_by(
    key: ReadKey | RoundsKey, params: EngineParams, state: EngineState
) -> tuple[EngineParams, EngineState]:
    """The weights and the state as the program of a key takes them."""
    if not key.undrafted:
        return params, state
    params = without_drafter(params)
    pool, rows = state.pool.replace(draft=None), state.rows.replace(draft=None)
    return params, state.replace(pool=pool, rows=rows, drafter=params.drafter_name)


def run_as(
    key: ReadKey | RoundsKey, program: Any, params: EngineParams, state: EngineState, *rest: Any
) -> tuple[EngineState, Emitted]:
    """Run the program of a key on the engine's state."""
    after, emitted = program(*seen_by(key, params, state), *rest)
    if key.undrafted:
        pool = after.pool.replace(draft=state.pool.draft)
        rows = after.rows.replace(draft=state.rows.draft)
        after = after.replace(pool=pool, rows=rows, drafter=state.drafter)
    return after, emitted
