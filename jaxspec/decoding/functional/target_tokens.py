"""The target's own tokens, which reading draws: after a prompt, or after each token of a draft."""

import jax.numpy as jnp
from jax import Array

from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import (
    History,
    Logprobs,
    control_logits,
    perturb,
    policy_logprobs,
    process_logits,
    token_logprobs,
    vocab_ids,
)
from jaxspec.decoding.state import Ending, EngineState, Rows, Status
from jaxspec.parallel import Layout, collectives


def draw(
    options: RoundOptions,
    layout: Layout,
    state: EngineState,
    logits: Array,
    place: Array,
    history: History | None,
) -> tuple[Array, Array]:
    """The tokens at ``place`` [B, T], from their logits [B, T, V / shards], and whether what they
    are drawn from is finite [B, T]. ``history``: what penalties count; None: there are none."""
    rows, greedy, kernels = state.rows, options.greedy, options.kernels
    if history is not None and state.controls is not None:
        logits = control_logits(logits, state.controls, history, rows.stop_tokens, layout)
    processed = process_logits(logits, rows.sampling, layout, greedy=greedy, kernels=kernels)
    ids = vocab_ids(logits.shape[-1], layout)
    noisy = perturb(processed, rows.sampling, place, ids, greedy=greedy)
    return collectives.argmax(noisy, layout), collectives.all_finite(logits, layout)


def scores(
    options: RoundOptions, layout: Layout, rows: Rows, raw: Array, tokens: Array
) -> tuple[Logprobs | None, Array | None]:
    """What is asked for of tokens [B, T], from raw logits [B, T, V / shards]: log-probabilities,
    and those of the policy that samples."""
    logprobs = of_policy = None
    if options.logprobs:
        logprobs = token_logprobs(raw, tokens, options.top_logprobs, layout, options.kernels)
    if options.policy_logprobs:
        how = {"greedy": options.greedy, "kernels": options.kernels}
        of_policy = policy_logprobs(raw, tokens, rows.sampling, layout, **how)
    return logprobs, of_policy


def endings(rows: Rows, roots: Array, root_at: Array, finite: Array) -> tuple[Array, Array]:
    """How rows end, and their status, once they have the tokens ``roots`` [R] at ``root_at`` [R],
    which were drawn from ``finite`` [R] logits or not."""
    ending = jnp.where(root_at + 1 >= rows.max_lens, Ending.LENGTH, Ending.NONE)
    stopped = jnp.any(roots[:, None] == rows.stop_tokens, axis=1)
    ending = jnp.where(stopped, Ending.STOP, ending)
    ending = jnp.where(finite, ending, Ending.NOT_FINITE)
    return ending, jnp.where(ending == Ending.NONE, Status.DECODING, Status.DONE)
