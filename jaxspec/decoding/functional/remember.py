"""Past texts, which drafters may look up."""

from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxspec.decoding.functional.checks import as_int32, check_state
from jaxspec.decoding.functional.params import EngineParams, Integers, on_mesh
from jaxspec.decoding.state import EngineState


def remember(
    params: EngineParams, state: EngineState, tokens: Integers, count: ArrayLike
) -> EngineState:
    """Add the first ``count`` of ``tokens`` [n] to the past text that the drafter looks up.

    A text may come in several parts, of at most the ring's size each; its last token must be
    past_text.GAP. No rounds may run before that. Every device gets all of it.

    Raises ValueError if the drafter looks up no past text.
    """
    check_state(params, state)
    if state.pool.past is None:
        raise ValueError("the drafter looks up no past text: see SuffixDrafter.past")
    arguments = as_int32("tokens", tokens, "[n]"), as_int32("count", count, "[]")
    return on_mesh(_remember, params, state, arguments, (P(), P()), None)


def _remember(params: EngineParams, state: EngineState, tokens: Array, count: Array) -> EngineState:
    pool = state.pool
    assert pool.past is not None
    return state.replace(pool=pool.replace(past=pool.past.with_more(tokens, count)))
