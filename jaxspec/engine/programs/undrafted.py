"""Programs without a drafter, for rows that it has not read.

They run on the engine's state without the drafter's part, which is put back afterwards as it was:
no array is copied. A program with the drafter serves such rows too, if there is no other: it reads
and drafts poorly what it has not read from the start, and the target verifies every token.
"""

from jaxspec.decoding.drafters import NoDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.state import EngineState
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


def with_draft_of(before: EngineState, state: EngineState) -> EngineState:
    """A state that such a program has returned, with the drafter's part of the one ``before``."""
    pool = state.pool.replace(draft=before.pool.draft)
    rows = state.rows.replace(draft=before.rows.draft)
    return state.replace(pool=pool, rows=rows, drafter=before.drafter)
