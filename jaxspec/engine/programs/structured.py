"""The two programs of a round whose tokens the host restricts, as calls on an engine's state."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Kind, Load, ReadKey, RoundsKey


class Drafted(NamedTuple):
    """Trees of rows [B], some of them padding, that wait for their masks."""

    key: RoundsKey
    rows: np.ndarray
    tree: DraftTree


def run_draft(
    programs: Programs,
    rows: Sequence[int],
    tokens: int,
    load: Load,
    *,
    shape: TreeShape,
    kind: Kind,
) -> Drafted:
    """The first half of a round of some rows; see Programs.run_rounds."""
    key = programs.rounds_key(rows, tokens, load, shape, kind, masked=True)
    prepare_masked(programs, key)
    return _draft(programs, key, programs.sizes.listed(rows, key.rows))


def prepare_program(programs: Programs, key: ReadKey | RoundsKey) -> None:
    """Compile a program, by running it on nothing, unless it is ready. Raises what its compiler
    raises."""
    if isinstance(key, ReadKey):
        programs.prepare_reading(key)
    elif key.masked:
        prepare_masked(programs, key)
    else:
        programs.prepare_rounds(key)


def prepare_masked(programs: Programs, key: RoundsKey) -> None:
    """Compile both programs, by running them on nothing, unless they are ready."""
    if not programs.is_ready(key):
        with programs.counted(key):
            drafted = _draft(programs, key, programs.sizes.listed([], key.rows))
            run_verify(programs, drafted, no_masks(programs, drafted))


def no_masks(programs: Programs, drafted: Drafted) -> np.ndarray:
    """Masks of these trees that restrict nothing."""
    words = programs.all_tokens()
    return np.broadcast_to(words, (*drafted.tree.tokens.shape, words.size))


def _draft(programs: Programs, key: RoundsKey, rows: np.ndarray) -> Drafted:
    with programs.controlled(key.kind):
        programs.state, tree = programs.draft(
            programs.params, programs.state, programs.options(key), rows
        )
    return Drafted(key, rows, tree)


def run_verify(programs: Programs, drafted: Drafted, masks: np.ndarray) -> LaunchedCall:
    """The second half, with the masks of functional.verify_drafts."""
    key, rows, tree = drafted
    with programs.controlled(key.kind):
        programs.state, emitted = programs.verify(
            programs.params, programs.state, programs.options(key), rows, tree, masks
        )
    return LaunchedCall.now(rows, emitted)
