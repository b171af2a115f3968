"""What an engine's programs read beside the weights that it was given.

Nobody else sees it: what is loaded, trained, saved or replaced has a tied LM head, as the
checkpoint has.
"""

from typing import Any

import jax.numpy as jnp

from jaxspec.decoding.all_reduce_buffers import with_exchanges, without_exchanges
from jaxspec.decoding.functional import EngineParams
from jaxspec.models.linear import Linear
from jaxspec.parallel.pytree import pytree

# Bytes. A larger table is not doubled unasked. The pool is sized before the copy is made, and
# leaves a tenth of the free memory, which holds this much.
LARGEST_COPY = 32 << 20


@pytree
class TransposedEmbeddings(Linear):
    """The LM head of a model with tied embeddings. By its class it is told from one of the
    checkpoint's."""


def program_weights(params: EngineParams) -> EngineParams:
    """The parameters with exchanges (see decoding/all_reduce_buffers.py), and on a CPU with a copy
    of tied float32 embeddings, transposed, as the target's LM head.

    There XLA multiplies 2 to 16 rows with the copy in about 0.7 of the time that it takes with the
    table, and one row in the same. Prompts, plain steps and trees read the same LM head, so their
    texts agree.
    """
    params, target = with_exchanges(params), params.target
    if target.lm_head is not None or target.dtype != jnp.float32 or params.mesh is not None:
        return params
    devices = target.embed.devices()
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        return params
    if target.embed.nbytes > LARGEST_COPY:
        return params
    lm_head: Any = TransposedEmbeddings(weight=target.embed.T, axes=("whole_hidden", "vocab"))
    return params.replace(target=target.replace(lm_head=lm_head))


def as_loaded(params: EngineParams) -> EngineParams:
    """The parameters with models as they were loaded: a tied target, and on a single device no
    places where thread blocks meet, which nobody may save, train or give away."""
    if isinstance(params.target.lm_head, TransposedEmbeddings):
        params = params.replace(target=params.target.replace(lm_head=None))
    if params.mesh is None and params.target.exchange is not None:
        params = without_exchanges(params)
    return params
