"""The engine as pure functions over pytrees, for use inside your own ``jit``, ``vmap`` or ``scan``.

``params`` holds the weights and every static option. ``state`` holds everything that changes: a
pool of cache memory, and one row per sequence. A prompt is admitted to a row, read in chunks
(prefill) and continued (decode); then the row is released:

    params = load("model-dir", drafter="ngram")
    state = init_state(params, num_rows=1, max_length=512)
    state = admit(params, state, rows, prompts, prompt_lens)
    state, _ = prefill_all(params, state, width=64)
    state, emitted = decode(params, state, 100)
    state = release(params, state, rows)

A row that is done says why: ``Ending(int(state.rows.ending[row]))``, STOP, LENGTH or an error (see
state.Ending). What is wrong with known arguments is an error that names them. In a ``jit`` or
``vmap`` values are not known before the program runs: there the row ends with an error.

Where the host restricts the tokens of each node (structured output), a round is two calls,
``draft`` and ``verify_drafts``.

Each function may be jitted with its state donated.
"""

from jaxspec.decoding.functional.admission import admit
from jaxspec.decoding.functional.constrained import draft, verify_drafts
from jaxspec.decoding.functional.decode import catch_up, decode
from jaxspec.decoding.functional.padded import PaddedSamples, right_padded, split_padded
from jaxspec.decoding.functional.pages import (
    SavedRow,
    copy_pages,
    put_states,
    remember,
    restore_row,
    save_row,
    take_states,
)
from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.functional.prefill import prefill
from jaxspec.decoding.functional.rows import (
    assign_pages,
    init_pool,
    init_rows,
    init_state,
    no_controls,
    release,
    resume,
    set_controls,
)
from jaxspec.decoding.functional.sample import Samples, sample
from jaxspec.decoding.functional.verify_prefix import verify_prefix
from jaxspec.decoding.functional.whole_prompts import prefill_all

__all__ = [
    "EngineParams",
    "PaddedSamples",
    "Samples",
    "SavedRow",
    "admit",
    "assign_pages",
    "catch_up",
    "copy_pages",
    "decode",
    "draft",
    "init_pool",
    "init_rows",
    "init_state",
    "no_controls",
    "prefill",
    "prefill_all",
    "put_states",
    "release",
    "remember",
    "restore_row",
    "resume",
    "right_padded",
    "sample",
    "save_row",
    "set_controls",
    "split_padded",
    "take_states",
    "verify_drafts",
    "verify_prefix",
]
