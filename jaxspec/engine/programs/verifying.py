"""The programs that verify old texts as drafts, as calls on an engine's state."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.decoding.state import Emitted
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Kind, Load, VerifyKey, choose_verifying


class Verification(NamedTuple):
    """Read the next ``count`` tokens of a row, of which those after the first ``given`` tokens of
    the row are a draft. ``limit``: most tokens of the row."""

    row: int
    count: int
    given: int
    limit: int


def verify(
    programs: Programs, parts: Sequence[Verification], load: Load, kind: Kind
) -> LaunchedCall:
    """Read parts of drafts, and keep what the target writes itself; see verify_chunk."""
    key = _key(programs, parts, load, kind)
    _prepare(programs, key)
    return _run(programs, key, parts)


def prepare(programs: Programs, rows: int, tokens: int, kinds: Iterable[Kind]) -> None:
    """Compile, by running it on nothing, what verifies up to so many ``rows`` of each shard, of so
    many ``tokens``."""
    sizes = programs.sizes
    columns, width = sizes.columns_for(tokens), sizes.verified_at_once
    rows = sizes.rows_for(min(rows, sizes.verified_rows))
    for kind in kinds:
        _prepare(programs, VerifyKey(rows, columns, width, sizes.kind_for(kind)))


def _prepare(programs: Programs, key: VerifyKey) -> None:
    """Compile a program, by running it on nothing, unless it is ready."""
    if not programs.is_ready(key):
        with programs.counted(key):
            _run(programs, key, [])


def _key(programs: Programs, parts: Sequence[Verification], load: Load, kind: Kind) -> VerifyKey:
    sizes = programs.sizes
    columns = sizes.columns_for(max(part.limit for part in parts))
    rows = sizes.size_for([part.row for part in parts])
    wanted = VerifyKey(rows, columns, sizes.verified_at_once, sizes.kind_for(kind))
    loaded = min(-(-load.rows // programs.shards), sizes.verified_rows)
    target = wanted._replace(
        rows=max(rows, sizes.rows_for(loaded)),
        columns=max(columns, sizes.columns_for(load.tokens)),
        kind=max(wanted.kind, load.kind),
    )
    return choose_verifying(programs.runnable(), wanted, target)


def _run(programs: Programs, key: VerifyKey, parts: Sequence[Verification]) -> LaunchedCall:
    rows = programs.sizes.listed([part.row for part in parts], key.rows)
    by_row = {part.row: part for part in parts}
    found = [by_row.get(int(row)) for row in rows]
    counts = np.array([part.count if part else 0 for part in found], np.int32)
    given = np.array([part.given if part else 1 for part in found], np.int32)
    emitted: Emitted
    with programs.controlled(key.kind):
        arguments = programs.options(key), rows, counts, given
        result = programs.small["verify_chunk"](programs.params, programs.state, *arguments)
        programs.state, emitted = result
    return LaunchedCall.now(rows, emitted)
