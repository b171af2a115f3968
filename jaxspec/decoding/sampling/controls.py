"""Bias, bad sequences, penalties, a minimum length and budgets: what changes a row's logits before
temperature.

A penalty counts the tokens before the one that is sampled. At a tree node these are the committed
tokens and those on the path to the node, so every node has counts of its own. A text is then the
same with speculation and without.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxspec.config.checks import Problems, check_count
from jaxspec.config.sampling_params import LONGEST_BAD_SEQUENCE, MOST_BAD_SEQUENCES
from jaxspec.decoding.sampling.budgets import Budgets, forced_tokens, make_budgets
from jaxspec.decoding.sampling.history import History
from jaxspec.decoding.sampling.logits import (
    check_integers,
    check_range,
    check_size,
    per_row,
    vocab_ids,
)
from jaxspec.parallel import WHOLE, Layout
from jaxspec.parallel.collectives import shard_offset
from jaxspec.parallel.pytree import Pytree, array, pytree

LARGEST_REPETITION_PENALTY = 100.0
LARGEST_PENALTY = 2.0


@pytree
class Controls(Pytree):
    """Controls of each row. All are data: no value causes a compilation.

    ``prompt_lens`` says which tokens count as prompt and which as output. It is a request's own: a
    row that reads generated tokens again, after a preemption, does not count them as prompt.
    ``bad_sequences`` are padded with -1 in front; see SamplingParams.bad_sequence_table.
    """

    used: Array = array("batch")  # bool [B]; False: the row's logits stay as they are
    bias: Array = array("batch", "vocab")  # float32 [B, V / shards]; -inf: never sampled
    repetition_penalty: Array = array("batch")  # float32 [B], of prompt and output; 1: none
    presence_penalty: Array = array("batch")  # float32 [B], of output; 0: none
    frequency_penalty: Array = array("batch")  # float32 [B], of output; 0: none
    prompt_lens: Array = array("batch")  # int32 [B]
    min_lens: Array = array("batch")  # int32 [B], tokens before which no stop token is sampled
    bad_sequences: Array = array("batch", "sequences", "length")  # int32 [B, K, L], see below
    budgets: Budgets

    @property
    def penalized(self) -> Array:
        """Rows with a penalty: bool [B]."""
        repetition = self.repetition_penalty != 1
        others = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return self.used & (repetition | others)

    @property
    def forbids_sequences(self) -> Array:
        """Rows with bad sequences: bool [B]."""
        return jnp.any(self.bad_sequences[..., -1] >= 0, axis=1)


def make_controls(
    batch: int,
    vocab_size: int,
    *,
    bias: ArrayLike | None = None,
    repetition_penalty: ArrayLike = 1.0,
    presence_penalty: ArrayLike = 0.0,
    frequency_penalty: ArrayLike = 0.0,
    prompt_lens: ArrayLike = 0,
    min_tokens: ArrayLike = 0,
    bad_sequences: ArrayLike | None = None,
) -> Controls:
    """Controls of ``batch`` rows, from scalars or [B] arrays, which may be traced.

    Args:
      bias: float [B, V] or [V], added to the logits; -inf for a token that must not be sampled.
      repetition_penalty: divides positive logits of tokens that occur in the prompt or the output,
        and multiplies negative ones.
      presence_penalty, frequency_penalty: subtracted from the logits of tokens that occur in the
        output, once, or as many times as they do.
      prompt_lens: tokens that count as prompt, not as output.
      min_tokens: generated tokens before which no stop token of the row is sampled.
      bad_sequences: int [B, MOST_BAD_SEQUENCES, LONGEST_BAD_SEQUENCE], sequences of tokens that the
        output must not contain, each padded with -1 in front; None: none.

    Raises ValueError for a value out of range (traced values are not checked), and for arrays of
    other shapes or dtypes.
    """
    check_count("batch", batch)
    check_count("vocab_size", vocab_size)
    shape = (batch, vocab_size)
    size = (batch, MOST_BAD_SEQUENCES, LONGEST_BAD_SEQUENCE)
    bias = np.zeros(shape, np.float32) if bias is None else bias
    bad_sequences = np.full(size, -1, np.int32) if bad_sequences is None else bad_sequences
    problems = Problems()
    with problems.caught():
        if np.shape(bias) not in (shape, shape[1:]):
            raise ValueError(f"bias must be {list(shape)}, not {list(np.shape(bias))}")
        check_range("bias", bias, lambda x: x < np.inf, "finite, or -inf")
    _check_penalties(problems, batch, repetition_penalty, presence_penalty, frequency_penalty)
    for name, value in (("prompt_lens", prompt_lens), ("min_tokens", min_tokens)):
        with problems.caught():
            check_size(name, value, batch)
            check_integers(name, value)
            check_range(name, value, lambda x: x >= 0, "at least 0")
    with problems.caught():
        if np.shape(bad_sequences) != size:
            given = list(np.shape(bad_sequences))
            raise ValueError(f"bad_sequences must be {list(size)}, not {given}")
        check_integers("bad_sequences", bad_sequences)
    problems.raise_all()
    if not isinstance(bias, Tracer | Array):
        bias = np.asarray(bias, np.float32)
    bias = jnp.broadcast_to(jnp.asarray(bias, jnp.float32), shape)
    least = per_row(min_tokens, batch, jnp.int32)
    prompts = per_row(prompt_lens, batch, jnp.int32)
    controls = Controls(
        used=jnp.ones(batch, bool),
        bias=bias,
        repetition_penalty=per_row(repetition_penalty, batch, jnp.float32),
        presence_penalty=per_row(presence_penalty, batch, jnp.float32),
        frequency_penalty=per_row(frequency_penalty, batch, jnp.float32),
        prompt_lens=prompts,
        min_lens=jnp.where(least > 0, prompts + least, 0),
        bad_sequences=jnp.asarray(bad_sequences, jnp.int32),
        budgets=make_budgets([None] * batch),
    )
    masked = (least > 0) | jnp.any(bias != 0, axis=1) | controls.forbids_sequences
    return controls.replace(used=controls.penalized | masked)


def _check_penalties(
    problems: Problems,
    batch: int,
    repetition: ArrayLike,
    presence: ArrayLike,
    frequency: ArrayLike,
) -> None:
    """See make_controls."""
    name, largest = "repetition_penalty", LARGEST_REPETITION_PENALTY
    with problems.caught():
        rule = f"in [{1 / largest}, {largest}]"
        check_range(name, repetition, lambda x: (x >= 1 / largest) & (x <= largest), rule)
        check_size(name, repetition, batch)
    for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        with problems.caught():
            rule = f"in [-{LARGEST_PENALTY}, {LARGEST_PENALTY}]"
            check_range(name, value, lambda x: np.abs(x) <= LARGEST_PENALTY, rule)
            check_size(name, value, batch)


def with_budgets(controls: Controls, budgets: Budgets) -> Controls:
    """The same controls with budgets of reasoning, of as many rows."""
    return controls.replace(budgets=budgets, used=controls.used | budgets.used)


def control_logits(
    logits: Array,
    controls: Controls,
    history: History,
    stop_tokens: Array,
    layout: Layout = WHOLE,
) -> Array:
    """Apply bias, bad sequences, minimum length, penalties and budgets, in that order.

    Masks are added, so NaN stays NaN. Bad sequences, penalties and budgets are skipped at run time
    if no row has any.

    Args:
      logits: [B, N, V / shards] float32.
      stop_tokens: int32 [B, E], padded with -1.

    Returns the same shape. Rows without controls keep their logits.
    """
    ids = vocab_ids(logits.shape[-1], layout)
    stops = jnp.any(ids == stop_tokens[..., None], axis=1)  # [B, V / shards]
    too_early = history.sizes < controls.min_lens[:, None]  # [B, N]
    masked = too_early[..., None] & stops[:, None]
    logits = logits + controls.bias[:, None] + jnp.where(masked, -jnp.inf, 0.0)

    def forbidden(logits: Array) -> Array:
        return logits + _ends_of_sequences(logits, controls, history, layout)

    def penalized(logits: Array) -> Array:
        return _penalized(logits, controls, history, layout)

    logits = lax.cond(jnp.any(controls.forbids_sequences), forbidden, lambda x: x, logits)
    logits = lax.cond(jnp.any(controls.penalized), penalized, lambda x: x, logits)
    forced = forced_tokens(controls.budgets, history, controls.prompt_lens)[..., None]  # [B, N, 1]
    return logits + jnp.where((forced >= 0) & (ids != forced), -jnp.inf, 0.0)


def _ends_of_sequences(
    logits: Array, controls: Controls, history: History, layout: Layout
) -> Array:
    """What is added to the logits: -inf for tokens that would end a bad sequence, else 0."""
    batch, nodes, size = logits.shape
    sequences = controls.bad_sequences  # [B, K, L]
    before = history.last(sequences.shape[-1] - 1, controls.prompt_lens)[:, :, None]
    begun, end = sequences[:, None, :, :-1], sequences[:, None, :, -1]
    is_complete = jnp.all((begun < 0) | (begun == before), axis=-1)  # [B, N, K]
    local = end - shard_offset(size, layout.vocab)
    here = is_complete & (end >= 0) & (local >= 0) & (local < size)
    row, node = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[:, None]
    mask = jnp.zeros_like(logits)
    return mask.at[row, node, jnp.where(here, local, size)].set(-jnp.inf, mode="drop")


def _penalized(logits: Array, controls: Controls, history: History, layout: Layout) -> Array:
    repetition, presence, frequency = (
        x[:, None, None]
        for x in (
            controls.repetition_penalty,
            controls.presence_penalty,
            controls.frequency_penalty,
        )
    )
    ids = vocab_ids(logits.shape[-1], layout)
    in_prompt, in_output = _counts(controls, history, logits.shape[-1], layout)
    # One comparison for each token of the path. All this is elementwise, so a compiler does it in
    # one pass over the logits, and the counts of nodes are never written to memory.
    counts = in_output[:, None]
    for depth in range(history.path.shape[-1]):
        counts = counts + (ids == history.path[:, :, depth, None])
    generated = counts > 0
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt[:, None] | generated, scaled, logits)
    return logits - frequency * counts - presence * generated


def _counts(controls: Controls, history: History, size: int, layout: Layout) -> tuple[Array, Array]:
    """The committed tokens of each row by token id, of this shard's ``size`` ids.

    Returns whether the prompt has it, bool [B, size], and how often the output does, int32.
    """
    tokens = history.tokens
    batch, length = tokens.shape
    place, row = jnp.arange(length), jnp.arange(batch)[:, None]
    local = tokens - shard_offset(size, layout.vocab)
    here = (local >= 0) & (local < size) & (place < history.lens[:, None])
    is_prompt = place < controls.prompt_lens[:, None]
    prompt, output = (jnp.where(here & part, local, size) for part in (is_prompt, ~is_prompt))
    return (
        jnp.zeros((batch, size), bool).at[row, prompt].set(True, mode="drop"),
        jnp.zeros((batch, size), jnp.int32).at[row, output].add(1, mode="drop"),
    )
