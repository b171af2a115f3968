"""The engine as pure functions over pytrees, for use inside your own ``jit``, ``vmap`` or ``scan``.

``params`` holds the weights and every static choice, ``state`` everything that changes: a pool of
cache memory, and rows, one for each sequence. A row is admitted with its prompt, reads it chunk by
chunk, decodes, and is released:

    params = load("model-dir", drafter="ngram")
    state = init_state(params, num_rows=1, max_length=512)
    state = admit(params, state, rows, prompts, prompt_lens)
    state, _ = prefill(params, state, width=64)
    state, emitted = decode(params, state, 100)
    state = release(params, state, rows)

Each may be jitted with its state donated.
"""

from jaxspec.functional.decode import decode
from jaxspec.functional.params import EngineParams
from jaxspec.functional.prefill import prefill
from jaxspec.functional.rows import admit, init_pool, init_rows, init_state, release

__all__ = [
    "EngineParams",
    "admit",
    "decode",
    "init_pool",
    "init_rows",
    "init_state",
    "prefill",
    "release",
]
